"""What the plugin refuses, before a model is loaded."""

from __future__ import annotations

from mtagen.errors import InputError, explain
from vllm.config import VllmConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

DRAFTS = ("ngram",)  # methods whose drafts were tested


def check_config(config: VllmConfig) -> None:
    """Check the options of vLLM.

    Raises:
        InputError: an option is not supported.
    """
    kept, dtype = config.cache_config.cache_dtype, config.model_config.dtype
    if kv_cache_dtype_str_to_dtype(kept, config.model_config) != dtype:
        rule = f"keys and values must have the model's dtype, {dtype}"
        raise InputError(explain("kv_cache_dtype", kept, rule, "auto"))
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS:
        rule = "only drafts of these methods were tested"
        raise InputError(explain("speculative_config: method", drafts.method, rule, DRAFTS))
    if config.kv_transfer_config is not None:
        connector, rule = config.kv_transfer_config.kv_connector, "a connector may leave out the queries behind a page"
        raise InputError(explain("kv_transfer_config", connector, rule, None))


def spare_of(config: VllmConfig) -> int:
    """Return how many tokens vLLM may take back: all drafts of a step."""
    drafts = config.speculative_config
    return 0 if drafts is None else drafts.num_speculative_tokens
