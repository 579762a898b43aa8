"""Parameters of logits and sinks in Triton's kernels of "lift": values, gradients, documents and decode steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import failures_in_triton as failures

import mtagen
from mtagen.check import check
from mtagen.measure.cases import Sizes

# A tile of few rows and of few keys, grouped heads, more than one tile, and more queries than keys.
SIZES = (Sizes(2, 4, 2, 40, 40), Sizes(1, 2, 1, 3, 150), Sizes(1, 2, 2, 20, 9))
EXPRESSIONS: dict[str, dict[str, Any]] = {
    "slopes": {"logits": "s - slopes[h] * (i - j) / 8", "parameters": {"slopes": "h"}},
    "table": {"logits": "s + table[h, min(8, i - j)]", "parameters": {"table": "h,9"}},
    "two axes of a table": {"logits": "s + t[h, 1, max(0, min(3, i - j))]", "parameters": {"t": "h,2,4"}},
    "gates": {"logits": "s + gates[b, h, i] - gates[b, h, j]", "parameters": {"gates": "b,h,i"}},
    "keys of all heads": {"logits": "s + bias[b, j]", "parameters": {"bias": "b,j"}},
    "a table of all heads": {"logits": "s + t[max(0, min(6, i - j))]", "parameters": {"t": "7"}},
    "keys of all heads and entries": {"logits": "s * t[j] + u[2]", "parameters": {"t": "j", "u": "3"}},
    "one number": {"logits": "s * t * log(i + 2) / 4", "parameters": {"t": ""}},
    "of the score": {"logits": "t[h] * tanh(s / t[h])", "parameters": {"t": "h"}},
    "sink": {"sink": True},
}
STAGES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "a convolution": {"kernel": (3, 5)},
    "lifted queries": {"kernel": (5, 2), "window": (30, 0)},
}


CASES = [
    *((expression, stages) for stages in ("plain", "a convolution") for expression in EXPRESSIONS),
    *((expression, "lifted queries") for expression in ("table", "gates", "sink")),
]


@pytest.mark.parametrize(("expression", "stages"), CASES)
def test_batch(expression: str, stages: str) -> None:
    assert not failures(*SIZES[: 3 if stages == "plain" else 2], **STAGES[stages], **EXPRESSIONS[expression])


@pytest.mark.parametrize("constants", [("c", "d"), ("c", "d", "t")])
@pytest.mark.parametrize("stages", STAGES)
def test_constants(stages: str, constants: tuple[str, ...]) -> None:
    """Parameters without a gradient come before and after others, and may have a table for each token."""
    options = {
        "logits": "s * c[h] / 2 + t[b, h, j] + d[h, max(0, min(2, i - j)), i]",
        "parameters": {"c": "h", "t": "b,h,j", "d": "h,3,i"},
    }
    assert not failures(*SIZES[:2], **STAGES[stages], **options, constants=constants)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("stages", [{"kernel": None}, {"kernel": (3, 5)}], ids=["plain", "a convolution"])
def test_all_keys_seen(stages: dict[str, Any], target: str) -> None:
    """Without a causal mask, only the number of keys hides the columns behind the last key."""
    options = {"logits": "s - slopes[h] * (i - j) / 8 + t[h, min(8, abs(i - j))] + g[b, h, i]", "causal": False}
    parameters = {"slopes": "h", "t": "h,9", "g": "b,h,i"}
    assert not failures(Sizes(2, 2, 1, 40, 41), **stages, **options, parameters=parameters, target=target)


PACKED = {name: EXPRESSIONS[name] for name in ("table", "gates", "keys of all heads", "sink")}
PACKED["constants"] = {
    "logits": "s * c[b] + gates[b, h, i] - gates[b, h, j] + t[h]",
    "parameters": {"c": "b", "gates": "b,h,i", "t": "h"},
    "constants": ("c", "gates"),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents(name: str) -> None:
    op = mtagen.build((3, 5), 16, backend="triton", dtype="fp32", **PACKED[name])
    rows = check(op, replace(op.plan.spec, packed=True), torch.device("cpu"), [Sizes(2, 4, 2, 20, 20)])
    assert not [f"{row.sizes} {row.result}" for row in rows if not row.comparison.ok]


def test_pairs() -> None:
    options = {"logits": "s + pair[b, h, i, j]", "parameters": {"pair": "b,h,i,j"}}
    assert not failures(*SIZES[:2], kernel=(3, 5), **options)
    assert not failures(*SIZES[:2], kernel=None, mixed_heads=2, **options)


def test_all_at_once() -> None:
    """With dropout, in a window, from the left and the right."""
    options = EXPRESSIONS["gates"] | {"sink": True, "dropout": True, "window": (20, 3), "causal": False}
    op = mtagen.build(kernel=(3, 5), head_dim=16, backend="triton", dtype="fp32", **options)
    rows = check(op, replace(op.plan.spec, dropout=True), torch.device("cpu"), [Sizes(1, 2, 1, 40, 40)])
    assert not [f"{row.sizes} {row.result}" for row in rows if not row.comparison.ok]


def test_gradients_are_reproducible() -> None:
    op = mtagen.build((3, 5), 16, backend="triton", dtype="fp32", **EXPRESSIONS["table"], sink=True)
    tensors = [torch.randn(2, 4, 40, 16) for _ in range(3)] + [torch.randn(4, 3, 5)]
    table, sink = torch.randn(4, 9, requires_grad=True), torch.randn(4, requires_grad=True)
    runs = [
        torch.autograd.grad(op(*tensors, sink=sink, parameters={"table": table}).square().sum(), (table, sink))
        for _ in range(2)
    ]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize("later", [torch.nan, 1e4])
def test_tokens_after_a_row_reach_nothing_of_it(later: float) -> None:
    """Entries of later tokens change no bit of a row and, with finite numbers, of its gradients."""
    op = mtagen.build((3, 5), 16, backend="triton", dtype="fp32", **EXPRESSIONS["gates"])
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    weight, gates = torch.randn(2, 3, 5), torch.randn(1, 2, 40)
    changed = gates.clone()
    changed[..., 30:] = later
    rows = [op(q, k, v, weight, parameters={"gates": x.requires_grad_()})[:, :, :30] for x in (gates, changed)]
    assert torch.equal(*rows)
    if later == later:
        grads = [torch.autograd.grad(x.square().sum(), y)[0] for x, y in zip(rows, (gates, changed), strict=True)]
        assert torch.equal(*(x[..., :30] for x in grads))
