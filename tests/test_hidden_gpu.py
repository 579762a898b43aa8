"""Kernels on a GPU: what the mask hides changes no bit of a result that does not depend on it. `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import hidden
import pytest
import torch
from hidden import PIPELINES, WINDOWS

import mtagen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BACKENDS = {  # and targets: Triton's kernels of sm_80 take pointers instead of descriptors
    "cuda": {"backend": "cuda"},
    "triton": {"backend": "triton"},
    "triton by pointers": {"backend": "triton", "target": "sm_80"},
    "cuda of sm_80": {"backend": "cuda", "target": "sm_80"},
}
CASES = {  # stages, and the edges of masks that they are tried with
    "plain": ("causal", "both edges"),
    "convolution": ("later edge", "left edge"),
    "convolution of more queries than keys": ("sliding",),
    "paper": ("causal", "sliding", "narrow"),
    "output": ("causal", "both edges"),
    "pairs after": ("causal",),
    "mixed": ("sliding",),
    "all": ("causal", "both edges"),
}
PAIRS = [(stages, window) for stages, windows in CASES.items() for window in windows]


def op_of(backend: str, stages: str, **options: Any) -> Any:
    return mtagen.build(head_dim=64, dtype="bf16", **BACKENDS[backend], **PIPELINES[stages], **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("stages", "window"), PAIRS)
def test_training(backend: str, stages: str, window: str) -> None:
    op = op_of(backend, stages, **WINDOWS[window])
    assert not hidden.training_failures(op, 500, 517, 400, "cuda", heads=4)


@pytest.mark.parametrize("backend", ["cuda", "cuda of sm_80"])
@pytest.mark.parametrize(
    "logits",
    [
        "s - (i - j) / 80",
        "s + log(1 + abs(i - j))",
        "s + min(j, 300) / 40",
        "30 * tanh(s / 30)",
        "s + 3 * tanh(s) - j / 9",
    ],
)
def test_expressions(backend: str, logits: str) -> None:
    """Rows keep their references where other rows of their warp see keys that exceed theirs."""
    op = op_of(backend, "paper", logits=logits)
    assert not hidden.training_failures(op, 500, 517, 400, "cuda", heads=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("stages", "window"), PAIRS)
def test_decode(backend: str, stages: str, window: str) -> None:
    op = op_of(backend, stages, **WINDOWS[window])
    assert not hidden.decode_failures(op, 500, 450, 3, "cuda", heads=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stages", CASES)
def test_documents(backend: str, stages: str) -> None:
    assert not hidden.document_failures(op_of(backend, stages, packed=True), "cuda", heads=4)
