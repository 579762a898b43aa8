"""The lowering "heads" on a GPU: accuracy, reproducibility, hidden numbers. `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import hidden
import pytest
import torch
from on_chip import mixed_on_chip

from mtagen.check import failures
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

CUDA = torch.device("cuda")
CASES: dict[str, tuple[int, Spec]] = {  # heads of queries
    "before and after": (16, Spec(None, 64, mixed_heads=16, post_mixed_heads=16)),
    "before": (32, Spec(None, 64, mixed_heads=16)),
    "before, all keys, fp16": (16, Spec(None, 64, mixed_heads=16, causal=False, dtype="fp16")),
    "after": (32, Spec(None, 64, post_mixed_heads=16)),
    "12 heads, wide values": (12, Spec(None, 48, 64, mixed_heads=12, post_mixed_heads=6)),
    "a window": (16, Spec(None, 64, mixed_heads=16, post_mixed_heads=16, window=(300, -1))),
    "13 heads, a window on both sides": (13, Spec(None, 32, mixed_heads=13, causal=False, window=(70, 30))),
}
every_case = pytest.mark.parametrize(("heads", "spec"), CASES.values(), ids=CASES)


def build(spec: Spec) -> AttentionOp:
    made = mixed_on_chip(spec)
    assert made["forward"].lowering == "heads"
    return assemble(made, torch_on_cpu=False)


@every_case
def test_accuracy(heads: int, spec: Spec) -> None:
    """One row; more keys than queries, grouped; more queries than keys; many blocks and chunks."""
    shared = heads // 4 if heads % 4 == 0 else 1
    sizes = (
        Sizes(8, heads, heads, 1, 1),
        Sizes(2, heads, shared, 113, 203),
        Sizes(1, heads, heads, 203, 113),
        Sizes(1, heads, shared, 1023, 1024),
        Sizes(2, heads, heads, 2049, 2050),
    )
    assert not failures(build(spec), spec, CUDA, sizes)


@every_case
def test_bit_reproducible(heads: int, spec: Spec) -> None:
    op = build(spec)
    tensors: dict[str, Any] = Sampler.for_timing(spec, Sizes(2, heads, heads, 1500, 1600), CUDA).inputs().named
    first = op(**tensors, return_lse=True)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, op(**tensors, return_lse=True), strict=True))


@pytest.mark.parametrize("name", ["before and after", "before", "a window"])
def test_hidden_numbers(name: str) -> None:
    heads, spec = CASES[name]
    assert not hidden.training_failures(build(spec), 700, 721, 400, "cuda", heads)
