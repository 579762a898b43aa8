"""Options of vLLM that are refused before a model is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtagen.errors import InputError
from mtagen.ops.pages import check_page_size
from mtagen_vllm.checks import check_config, spare_of


def config(**changes: Any) -> Any:
    """Return options that are supported, except for ``changes``."""
    supported = {
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
        "speculative_config": SimpleNamespace(method="ngram", num_speculative_tokens=3),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "kv_transfer_config": None,
        "lora_config": None,
    }
    return SimpleNamespace(**supported | changes)


@pytest.mark.parametrize("kept", ["auto", "bfloat16"])
def test_supported_options(kept: str) -> None:
    check_config(config(cache_config=SimpleNamespace(cache_dtype=kept)))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"cache_config": SimpleNamespace(cache_dtype="fp8")},
            "kv_cache_dtype: got 'fp8'; keys and values must have the dtype of the model, torch.bfloat16; legal: auto",
        ),
        ({"cache_config": SimpleNamespace(cache_dtype="float16")}, "kv_cache_dtype: got 'float16'"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "method of speculative_config: got 'eagle'"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline_parallel_size: got 2"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="Nixl")}, "kv_transfer_config: got 'Nixl'"),
        ({"lora_config": SimpleNamespace()}, "enable_lora: got True"),
    ],
)
def test_options_that_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        check_config(config(**changes))


@pytest.mark.parametrize("size", [8, 24])
def test_pages_of_a_gpu(size: int) -> None:
    with pytest.raises(InputError, match=f"page size: got {size}; must be a power of two, at least 16"):
        check_page_size(size, "cuda")


def test_all_drafts_may_be_taken_back() -> None:
    assert spare_of(config()) == 3
    assert spare_of(config(speculative_config=None)) == 0
