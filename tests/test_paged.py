"""Calls on keys and values in pages: right values, bits, what nobody owns, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import Paged, assert_alone_alike, contiguous, draw, expected

import mtagen
from mtagen import InputError
from mtagen.ops.attention import AttentionOp

REQUESTS = ((1, 1), (3, 20), (0, 7), (16, 16), (1, 33), (5, 40), (0, 0), (1, 17), (2, 2))
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "convolution": {"kernel": (6, 11)},
    "everything": {"kernel": (3, 4), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2},
    "window": {"kernel": (3, 4), "post_mixed_heads": 2, "window": (5, 0)},
    "output": {"kernel": (4, 3), "mask": "output"},
    "soft-cap": {"kernel": (3, 4), "logits": "5 * tanh(s / 5)"},
}
every_pipeline = pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)


def built(**options: Any) -> AttentionOp:
    return mtagen.build(**{"kernel": (6, 11), "head_dim": 16, "backend": "torch"} | options)


def called(op: AttentionOp, given: Paged, **changes: Any) -> Any:
    return op.paged(**given.arguments | changes)


@every_pipeline
@pytest.mark.parametrize("size", [2, 16, 64])
def test_equals_the_reference(stages: dict[str, Any], size: int) -> None:
    op = built(**stages)
    given = draw(op.plan.spec, REQUESTS, size)
    torch.testing.assert_close(called(op, given), expected(op.plan.spec, REQUESTS, given), rtol=1e-9, atol=1e-9)


@every_pipeline
def test_has_the_bits_of_contiguous_keys(stages: dict[str, Any]) -> None:
    op = built(**stages)
    given = draw(op.plan.spec, REQUESTS, 16, dtype=torch.float32)
    assert torch.equal(called(op, given), contiguous(op, given))


@every_pipeline
@pytest.mark.parametrize("new", [1, 3, 9])
def test_requests_with_as_many_rows(stages: dict[str, Any], new: int) -> None:
    op = built(**stages)
    requests = [(new, keys) for keys in (new, 20, 33, 40)]
    given = draw(op.plan.spec, requests, 16)
    out = called(op, given, cu_seq_q=None)
    assert torch.equal(out, contiguous(op, given))
    torch.testing.assert_close(out, expected(op.plan.spec, requests, given), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        called(op, given, cu_seq_q=None, return_lse=True)[1], called(op, given, return_lse=True)[1]
    )


def test_the_order_of_pages_changes_no_bit() -> None:
    op = built()
    given = draw(op.plan.spec, REQUESTS, 8)
    order = torch.randperm(len(given.arguments["k_pages"]))
    to = order.argsort().to(torch.int32)
    table = given.arguments["block_table"]
    moved = torch.where(table < len(to), to[table.clamp(max=len(to) - 1)], table)
    pages = {name: given.arguments[name][order] for name in ("k_pages", "v_pages")}
    assert torch.equal(called(op, given), called(op, given, block_table=moved, **pages))


@every_pipeline
def test_other_requests_change_no_bit(stages: dict[str, Any]) -> None:
    op = built(**stages)
    given = draw(op.plan.spec, REQUESTS, 16, dtype=torch.float32)
    assert_alone_alike(op, given, num_splits=1)


def test_log_sum_exps_and_grouped_heads() -> None:
    op = built(kernel=None)
    given = draw(op.plan.spec, REQUESTS, 16, heads=6, kv_heads=3)
    out, lse = called(op, given, return_lse=True)
    first = 0
    for (new, _), (q, k, _) in zip(REQUESTS, given.sequences, strict=True):
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) / 4
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        sums = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)[:, len(q) - new :]
        torch.testing.assert_close(lse[:, first : first + new], sums.to(lse.dtype))
        first += new
    assert len(out) == first


def test_padding_and_pages_in_a_larger_tensor() -> None:
    op = built()
    given = draw(op.plan.spec, REQUESTS, 16)
    padded = torch.cat([given.arguments["q"], torch.full((7, 4, 16), torch.nan, dtype=torch.float64)])
    both = torch.stack([given.arguments["k_pages"], given.arguments["v_pages"]], 2)  # as engines store them
    out = called(op, given, q=padded, k_pages=both[:, :, 0], v_pages=both[:, :, 1])
    assert torch.equal(out[:-7], called(op, given))
    assert not out[-7:].any()


def test_unused_entries_of_a_step_of_single_tokens() -> None:
    op = built()
    given = draw(op.plan.spec, ((1, 20), (1, 3)), 16)
    q = torch.cat([given.arguments["q"], torch.full((6, 4, 16), torch.nan, dtype=torch.float64)])
    table = torch.nn.functional.pad(given.arguments["block_table"], (0, 0, 0, 1), value=-1)
    lengths = torch.tensor([20, 3, 0], dtype=torch.int32)
    out = called(op, given, q=q, block_table=table, lengths=lengths, cu_seq_q=None)
    assert torch.equal(out[:2], called(op, given, cu_seq_q=None))
    assert not out[2:].any()


def test_no_requests() -> None:
    op = built()
    given = draw(op.plan.spec, REQUESTS, 16)
    none = {"block_table": torch.zeros(0, 1, dtype=torch.int32), "lengths": torch.zeros(0, dtype=torch.int32)}
    nothing = none | {"q": given.arguments["q"][:0], "cu_seq_q": torch.zeros(1, dtype=torch.int32)}
    assert called(op, given, **nothing, max_q=0, max_k=0).shape == (0, 4, 16)
    padding = nothing | {"q": torch.full((3, 4, 16), torch.nan, dtype=torch.float64)}
    assert not called(op, given, **padding, max_q=0, max_k=0).any()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"k_pages": torch.zeros(9, 3, 2, 16), "v_pages": torch.zeros(9, 3, 2, 16)}, "page size: got 3; must be"),
    "axes": ({"k_pages": torch.zeros(9, 2, 16)}, "k_pages.shape: got (9, 2, 16); must have four axes"),
    "no pages": (
        {"k_pages": torch.zeros(0, 16, 2, 16), "v_pages": torch.zeros(0, 16, 2, 16)},
        "k_pages.shape: got (0, 16, 2, 16); must have a page",
    ),
    "different pages": ({"v_pages": torch.zeros(8, 16, 2, 16)}, "must have the same pages"),
    "dtype of lengths": ({"lengths": torch.ones(2, dtype=torch.int64)}, "lengths: got ((2,), torch.int64"),
    "table of another batch": ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "block_table: got ((3, 2)"),
    "no page": ({"block_table": torch.full((2, 2), 99, dtype=torch.int32)}, "block_table[0]: got 99; must be a page"),
    "negative page": ({"block_table": torch.full((2, 2), -1, dtype=torch.int32)}, "block_table[0]: got -1;"),
    "more keys than the table": ({"max_k": 49}, "max_k: got 49; must be at least the longest request's keys; 3 pages"),
    "more keys than max_k": ({"max_k": 4}, "lengths[1]: got 20; must be a number of keys; legal: 0..4"),
    "missing context": (
        {"cu_seq_q": torch.tensor([0, 4, 14], dtype=torch.int32), "max_q": 14},
        "rows of request 0: got 4; a request",
    ),
    "more queries than keys": ({"lengths": torch.tensor([2, 2], dtype=torch.int32)}, "rows of request 1: got 8;"),
    "other rows than max_q": ({"cu_seq_q": None, "max_q": 8}, "rows of q: got 14; without cu_seq_q each of 2 requests"),
    "a number for lengths": ({"cu_seq_q": None, "lengths": torch.tensor(3, dtype=torch.int32)}, "lengths: got ((), "),
    "gradients": ({"q": torch.zeros(14, 4, 16, requires_grad=True)}, "calls on pages compute no gradients"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_refused(changes: dict[str, Any], message: str) -> None:
    op = built()
    given = draw(op.plan.spec, ((1, 2), (3, 20)), 16, dtype=torch.float32, spare_pages=6)
    with pytest.raises(InputError) as caught:
        called(op, given, **changes)
    assert message in str(caught.value)


def test_ops_that_pages_cannot_serve() -> None:
    given = draw(built().plan.spec, ((1, 2),), 16, dtype=torch.float32)
    with pytest.raises(InputError, match="queries would see keys that later steps write"):
        called(built(causal=False), given)
    biased = built(logits="s + bias[b, h, j]", parameters={"bias": "b,h,j"})
    with pytest.raises(InputError, match="has an axis of tokens, and parameters do not lie in pages"):
        called(biased, given, parameters={"bias": torch.zeros(1, 4, 2)})


def test_sinks_compute_no_gradients() -> None:
    op = built(kernel=None, sink=True)
    given = draw(op.plan.spec, ((1, 2), (1, 20)), 16)
    for boundaries in (given.arguments["cu_seq_q"], None):
        with pytest.raises(InputError, match="calls on pages compute no gradients"):
            called(op, given, sink=torch.zeros(4, dtype=torch.float64, requires_grad=True), cu_seq_q=boundaries)


def test_parameters_of_requests() -> None:
    stages = {"kernel": None, "logits": "s - slopes[b, h] * (i - j)", "parameters": {"slopes": "b,h"}}
    op, alike = built(**stages), built(kernel=None, logits="s - 0.5 * (i - j)")
    given = draw(op.plan.spec, REQUESTS, 16)
    slopes = torch.full((len(REQUESTS), 4), 0.5, dtype=torch.float64)
    torch.testing.assert_close(called(op, given, parameters={"slopes": slopes}), called(alike, given))


def test_the_registered_ops_around_kernels() -> None:
    op = built()
    given = draw(op.plan.spec, REQUESTS, 16, dtype=torch.float32).arguments
    q, cu_seq_q, requests = given["q"].nan_to_num(), given["cu_seq_q"], len(REQUESTS)
    ops = torch.ops.mtagen
    torch.library.opcheck(ops.divide.default, (cu_seq_q, given["lengths"], 13))
    torch.library.opcheck(ops.last_rows.default, (q, cu_seq_q, 13))
    chunks, steps = (q, q[..., 0].mT.contiguous()), (torch.randn(requests, 4, 8, 16), torch.randn(requests, 4, 8))
    total = len(q) - requests * op.plan.spec.context
    for results in ((*chunks, *steps), (*chunks, None, None), (None, None, *steps)):
        torch.library.opcheck(ops.merge.default, (*results, cu_seq_q, total, op.plan.spec.context))
