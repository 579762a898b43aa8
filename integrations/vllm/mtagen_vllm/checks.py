"""Checks of vLLM's configuration, before a model is made."""

from __future__ import annotations

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from mtagen.errors import InputError, explain

DRAFTS = ("ngram",)  # methods of speculative decoding that were tested


def check_config(config: VllmConfig) -> None:
    """Check the options of vLLM.

    Raises:
        InputError: an option is not supported.
    """
    if envs.VLLM_BATCH_INVARIANT:
        rule = "how a prompt is cut into chunks depends on other requests, and with it the kernels that compute it"
        raise InputError(explain("VLLM_BATCH_INVARIANT", True, rule, "0"))
    kept, dtype = config.cache_config.cache_dtype, config.model_config.dtype
    if kv_cache_dtype_str_to_dtype(kept, config.model_config) != dtype:
        rule = f"keys and values must have the dtype of the model, {dtype}"
        raise InputError(explain("kv_cache_dtype", kept, rule, "auto"))
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS:
        rule = "only these methods were tested"
        raise InputError(explain("method of speculative_config", drafts.method, rule, DRAFTS))
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        rule = "layers on different ranks would need pages of one size"
        raise InputError(explain("pipeline_parallel_size", stages, rule, "1; tensor_parallel_size spreads heads"))
    if config.kv_transfer_config is not None:
        rule = "a connector may move keys and values without the queries that follow them"
        raise InputError(explain("kv_transfer_config", config.kv_transfer_config.kv_connector, rule, None))
    if config.lora_config is not None:
        raise InputError(explain("enable_lora", True, "adapters were not tested", "False, and merged weights"))


def spare_of(config: VllmConfig) -> int:
    """Return how many tokens of a request vLLM may take back in a step: all drafts."""
    drafts = config.speculative_config
    return 0 if drafts is None else drafts.num_speculative_tokens
