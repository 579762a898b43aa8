"""The option ``visible`` in Triton's kernels: values, gradients, documents and decode steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import masked
import pytest
import torch
from problems import failures_in_triton as failures

import mtagen
from mtagen.check import check
from mtagen.measure.cases import Sizes

# A tile of few rows and of few keys, grouped heads, more than one tile, and more queries than keys.
SIZES = (Sizes(2, 4, 2, 40, 40), Sizes(1, 2, 1, 3, 150), Sizes(2, 2, 2, 20, 9))
MASKS: dict[str, dict[str, Any]] = {
    **{name: masked.MASKS[name] for name in ("prefix", "padding", "begins with a token", "nothing")},
    "chunks": {"visible": "i // 24 == j // 24"},
    "chunks seen whole": {"causal": False, "visible": "i // 24 == j // 24", "window": (10, -1)},
    "later half": {"causal": False, "visible": "j >= i // 2"},
    "falling": {"causal": False, "visible": "(j < 50 - i) & (j >= 20 - i)"},
}
# Conditions that are checked for each pair.
GAPS: dict[str, dict[str, Any]] = {
    **{name: masked.GAPS[name] for name in ("sinks and a window", "two windows", "not itself")},
    "documents by numbers": {"visible": "ids[b, i] // 13 == ids[b, j] // 13", "parameters": {"ids": "b,i"}},
    "a list in a window": {
        "causal": False,
        "visible": "((list[min(3, j // 8)] % 2 == 1) | (j == i)) & (abs(i - j) < 18)",
        "parameters": {"list": "4"},
    },
    "chosen blocks": {
        "causal": False,
        "visible": "(blocks[b, i // 16, j // 16] % 3 == 1) | ((blocks[b, i // 16, j // 16] % 3 == 2) & (i - j < 9))",
        "parameters": {"blocks": "b,i//16,j//16"},
    },
}


STAGES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "a convolution": {"kernel": (3, 5)},
    "a mixture": {"kernel": None, "mixed_heads": 2},
    "all stages": {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 2},
    "after the softmax": {"kernel": None, "post_kernel": (2, 3), "scores": "3 * tanh(s / 3) + 1"},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("stages", ["plain", "a convolution"])
def test_batch(mask: str, stages: str) -> None:
    assert not failures(*SIZES, **STAGES[stages], **MASKS[mask])


def test_tiles_that_some_rows_see_in_part() -> None:
    """Whole blocks of rows have tiles that are not checked."""
    assert not failures(Sizes(1, 2, 1, 130, 150), kernel=None, **MASKS["later half"])


@pytest.mark.parametrize(
    ("stages", "mask"),
    [
        *(("plain", mask) for mask in GAPS),
        *(("a convolution", mask) for mask in ("two windows", "documents by numbers", "a list in a window")),
    ],
)
def test_batch_with_gaps(stages: str, mask: str) -> None:
    assert not failures(SIZES[0], SIZES[2], **STAGES[stages], **GAPS[mask])


@pytest.mark.parametrize("stages", ["plain", "a convolution"])
def test_blocks_without_a_visible_key(stages: str) -> None:
    """The condition hides whole blocks at the beginning, and the bounds do not say so."""
    assert not failures(Sizes(1, 2, 1, 4, 600), visible="j // 300 % 2 == 1", **STAGES[stages])


@pytest.mark.parametrize("mask", ["sinks and a window", "two windows"])
def test_tiles_in_a_gap(mask: str) -> None:
    """Blocks of queries and of keys have tiles that are skipped."""
    assert not failures(Sizes(2, 2, 1, 200, 220), kernel=None, **GAPS[mask])


def test_tiles_in_blocks_that_are_not_chosen() -> None:
    mask = {"visible": "blocks[b, i // 64, j // 64] % 2 == 1", "parameters": {"blocks": "b,i//64,j//64"}}
    assert not failures(Sizes(2, 2, 1, 200, 220), kernel=None, causal=False, **mask)


@pytest.mark.parametrize(
    ("stages", "mask"),
    [
        ("a mixture", "sinks and a window"),
        ("all stages", "documents by numbers"),
        ("all stages", "a list in a window"),
        ("after the softmax", "not itself"),
    ],
)
def test_batch_of_other_stages_with_gaps(stages: str, mask: str) -> None:
    assert not failures(SIZES[0], **STAGES[stages], **GAPS[mask])


@pytest.mark.parametrize(
    ("stages", "mask"),
    [
        ("a mixture", "prefix"),
        ("a mixture", "falling"),
        ("all stages", "chunks seen whole"),
        ("after the softmax", "falling"),
    ],
)
def test_batch_of_other_stages(stages: str, mask: str) -> None:
    assert not failures(SIZES[0], SIZES[2], **STAGES[stages], **MASKS[mask])


@pytest.mark.parametrize("stages", ["plain", "a convolution", "a mixture"])
def test_with_expressions_and_sinks(stages: str) -> None:
    options = MASKS["prefix"] | {"logits": "s - slopes[h] * (i - j) / 8", "sink": True}
    options["parameters"] = {"prefix": "b", "slopes": "h"}
    assert not failures(SIZES[0], **STAGES[stages], **options)


@pytest.mark.parametrize(
    ("stages", "mask"),
    [
        ("plain", "prefix"),
        ("plain", "padding"),
        ("plain", "falling"),
        ("all stages", "prefix"),
        ("all stages", "chunks"),
        ("plain", "two windows"),
        ("all stages", "a list in a window"),
    ],
)
def test_packed_documents(stages: str, mask: str) -> None:
    options = (MASKS | GAPS)[mask] | STAGES[stages]
    op = mtagen.build(head_dim=16, backend="triton", dtype="fp32", dropout=True, **options)
    sizes = [Sizes(2, 4, 2, 20, 20), *([Sizes(3, 2, 2, 150, 140)] if stages == "plain" else [])]
    rows = check(op, replace(op.plan.spec, packed=True, dropout=True), torch.device("cpu"), sizes)
    assert not [f"{row.sizes} {row.result}" for row in rows if not row.comparison.ok]


@pytest.mark.parametrize("hidden", [torch.nan, 1e4])
@pytest.mark.parametrize("mask", ["prefix", "chunks", "every other key"])
@pytest.mark.parametrize("stages", ["plain", "a convolution"])
def test_hidden_keys_change_no_bit(stages: str, mask: str, hidden: float) -> None:
    """Rows that do not see them, and gradients of what these rows see, stay. Values are finite: 0 times NaN is NaN."""
    masks = MASKS | {"every other key": {"visible": "(j % 2 == 0) | (j < i % 3)"}}
    op = mtagen.build(head_dim=16, backend="triton", dtype="fp32", **masks[mask], **STAGES[stages])
    q, k, v = (torch.randn(2, 2, 60, 16) for _ in range(3))
    weights = {} if stages == "plain" else {"weight": torch.randn(2, 3, 5)}
    changed = [k.clone(), v.clone()]
    for x, value in zip(changed, (hidden, 1e4), strict=True):
        x[:, :, 24:] = value
        if mask == "every other key":
            x[:, :, 3::2] = value
    parameters = {"prefix": torch.tensor([11, 7])} if mask == "prefix" else None
    results = []
    for keys, values in ((k, v), changed):
        leaves = [x.requires_grad_() for x in (q, keys, values)]
        out = op(*leaves, **weights, parameters=parameters)[:, :, :24]
        grads = torch.autograd.grad(out.square().sum(), leaves) if hidden == hidden else leaves
        kept = slice(0, 24, 2 if mask == "every other key" else 1)
        results.append([out, grads[0][:, :, :24], *(grad[:, :, kept] for grad in grads[1:])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
