"""Expressions before the convolution that Triton's kernels of "lift" make a bias of convolved scores of."""

from __future__ import annotations

from typing import Any

import problems
import pytest
import torch

import mtagen
from mtagen import Spec, plan
from mtagen.measure.cases import Sizes

# More than one tile, more keys than queries, more queries than keys, and fewer than a filter reads.
SIZES = (
    Sizes(2, 4, 2, 70, 70),
    Sizes(1, 2, 1, 3, 90),
    Sizes(1, 2, 2, 20, 9),
    Sizes(1, 2, 1, 1, 1),
    Sizes(1, 2, 2, 3, 2),
)
TABLE: dict[str, Any] = {"scores": "s + t[h, max(0, min(8, i - j + 2))]", "parameters": {"t": "h,9"}}
CASES: dict[str, dict[str, Any]] = {
    "alibi": {"kernel": (3, 5), "scores": mtagen.expressions.alibi(4)},
    "a factor and slopes": {
        "kernel": (3, 4),
        "scores": "2 * s + t[h] * (i - j) / 8 + 1",
        "parameters": {"t": "h"},
    },
    "a table, full": {"kernel": (3, 5), "causal": False, **TABLE},
    "a table, lifted queries, by output": {"kernel": (5, 2), "window": (30, 0), "mask": "output", **TABLE},
    "a parameter that logits read, too": {
        "kernel": (2, 3),
        "scores": "s - t * abs(i - j) / 8",
        "logits": "s * t + g[b, h, j]",
        "parameters": {"t": "", "g": "b,h,j"},
        "sink": True,
    },
    "undefined where hidden": {"kernel": (3, 4), "scores": "s + sqrt(i - j)"},
    "no row or key past an end": {"kernel": (1, 4), "key_padding": "right", "scores": "s - (i - j) / 8"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_accurate(options: dict[str, Any]) -> None:
    """Calls, gradients and decode steps."""
    planned = plan(Spec(head_dim=16, **options), "sm_90a", "triton")
    assert len(planned.lift) == len(planned.passes)
    assert not problems.failures_in_triton(*SIZES, **options)


def test_gradients_are_reproducible() -> None:
    op = mtagen.build((3, 5), 16, backend="triton", dtype="fp32", **TABLE)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16), (2, 3, 5), (2, 9)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    found = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = op(*leaves[:4], parameters={"t": leaves[4]})
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(map(torch.equal, *found))
