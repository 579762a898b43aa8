"""Calls on pages by Triton's kernels: the bits of keys one after another, and those of each request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import assert_alone_alike, contiguous, draw

import mtagen
from mtagen.ops import library
from mtagen.ops.requests import divide
from mtagen.runtime.triton_package import serves

REQUESTS = ((1, 1), (3, 20), (0, 7), (10, 25), (9, 9), (0, 0))
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "lifted queries": {"kernel": (4, 2), "window": (9, 0)},
    "everything": {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 2},
}


@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
def test_bits(stages: dict[str, Any]) -> None:
    op = mtagen.build(**{"head_dim": 16} | stages, backend="triton")
    given = draw(op.plan.spec, REQUESTS, 16, heads=2, kv_heads=1, dtype=torch.float32)
    assert library.executor_of(op._key).variants(True, False, 16).reads_pages
    assert torch.equal(op.paged(**given.arguments), contiguous(op, given))
    assert_alone_alike(op, given, num_splits=2)


def test_compiled_for_any_sizes() -> None:
    """Pages are as long as a symbol while the call is traced."""
    op = mtagen.build((3, 4), 16, backend="triton")
    given = draw(op.plan.spec, REQUESTS, 16, heads=2, kv_heads=1, dtype=torch.float32)
    compiled = torch.compile(lambda **x: op.paged(**x), fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(**given.arguments), op.paged(**given.arguments))


def test_no_keys() -> None:
    """Calls whose requests may have no keys."""
    op = mtagen.build((3, 4), 16, mixed_heads=2, backend="triton")
    given = draw(op.plan.spec, [(0, 0), (0, 0)], 16, heads=2, kv_heads=1, dtype=torch.float32)
    rows = torch.ones(2 * (op.plan.spec.context + 1), 2, 16)
    none = {"q": rows, "cu_seq_q": None, "max_q": op.plan.spec.context + 1, "max_k": 0}
    pages = {"k_pages": torch.ones(1, 16, 1, 16), "v_pages": torch.ones(1, 16, 1, 16)}
    out, lse = op.paged(**given.arguments | none | pages, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, torch.full((2, 2), -torch.inf))


def test_steps_of_single_tokens() -> None:
    op = mtagen.build((3, 4), 16, backend="triton")
    requests = [(1, keys) for keys in (1, 17, 40)]
    given = draw(op.plan.spec, requests, 16, heads=2, kv_heads=1, dtype=torch.float32)
    torch.testing.assert_close(op.paged(**given.arguments | {"cu_seq_q": None}), op.paged(**given.arguments))


def test_more_requests_than_a_block_of_the_kernel_that_divides_them() -> None:
    rows, lengths = torch.randint(0, 30, (2, 2500), dtype=torch.int32)
    cu_seq_q = torch.nn.functional.pad(rows, (1, 0)).cumsum(0, dtype=torch.int32)
    steps, cu_seq_k = divide(cu_seq_q, lengths, 9)
    assert serves(lengths)
    assert torch.equal(steps, torch.where(rows > 9, 0, lengths))
    assert torch.equal(cu_seq_k.diff(), lengths - steps)
    assert cu_seq_k[0] == 0
