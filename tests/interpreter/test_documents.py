"""Packed documents in the kernels of the lowering "lift", run on the CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from documents import Lengths
from host_functions import with_small_tiles
from torch import Tensor

from mtagen.measure.judge import documents_op, eager_op, judge
from mtagen.spec import Spec

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

# No queries, no keys, neither; fewer than a halo has; when causal, queries that see no key.
SHORT = [(0, 5), (9, 0), (1, 1), (3, 2), (0, 0), (17, 34)]
# Documents that end in a strip, begin in one, and go on from one to the next; 128 rows make one.
LONG = [(2, 3), (133, 37), (0, 4), (126, 20)]
CASES: list[tuple[tuple[int, int] | None, dict[str, Any], str, Lengths]] = [
    ((2, 3), {}, "sm_80", LONG),
    ((3, 2), {"causal": False}, "sm_90a", LONG),
    ((4, 5), {"causal": False, "window": (9, 4), "mask": "output"}, "sm_90a", SHORT),
    ((4, 2), {"window": (5, -1), "head_dim": 24, "value_head_dim": 40, "dtype": "fp16"}, "sm_80", SHORT),
    (None, {"causal": False}, "sm_90a", SHORT),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("kernel", "options", "target", "lengths"), CASES, ids=str)
def test_accurate(kernel: tuple[int, int] | None, options: dict[str, Any], target: str, lengths: Lengths) -> None:
    spec = Spec(kernel, **{"head_dim": 16, "dtype": "fp32"} | options, packed=True)
    assert not documents.failures(with_small_tiles(spec, target), spec, lengths, 2, 1)


@pytest.mark.parametrize(("kernel", "options", "target", "lengths"), CASES, ids=str)
def test_rows_behind_the_last_document(
    kernel: tuple[int, int] | None, options: dict[str, Any], target: str, lengths: Lengths
) -> None:
    """They get zeros, and change nothing, though they hold NaN: as padding to a fixed length may."""
    spec = Spec(kernel, **{"head_dim": 16, "dtype": "fp32"} | options, packed=True)
    host = documents.with_rest(with_small_tiles(spec, target), 40, 70)
    assert not documents.failures(host, spec, lengths, 2, 1)


def test_keys_that_do_not_fill_a_vector() -> None:
    """What is stored behind a document's last key must not matter, though all of its scores are far below 0."""
    spec, lengths = Spec((1, 1), 16, dtype="fp16", causal=False, packed=True), [(5, 13), (6, 3)]
    inputs, grad_out = documents.random(spec, lengths, 1, 1)
    inputs = replace(inputs, q=inputs.q + 3, k=inputs.k - 3, weights={"weight": torch.ones(1, 1, 1)})
    host, packed = with_small_tiles(spec, "sm_90a"), documents.packed(lengths)
    ours = documents.op(host, spec, packed, None)

    def eager(*tensors: Tensor, document: int, **weights: Tensor) -> Any:
        return eager_op(spec, return_lse=True)(*tensors, **weights)

    judged = judge(ours, documents_op(eager, *map(list, zip(*lengths, strict=True))), inputs, grad_out)
    assert not {name: x for name, x in judged.items() if not x.ok}


@pytest.mark.parametrize(
    ("kernel", "causal", "document"),
    [((2, 3), False, (130, 15)), ((3, 2), True, (15, 30))],  # the first goes on from one strip to the next
)
def test_nothing_leaks(kernel: tuple[int, int], causal: bool, document: tuple[int, int]) -> None:
    """What other documents hold changes no bit of a document's results."""
    spec, lengths = Spec(kernel, 16, causal=causal, dtype="fp32", packed=True), [(20, 9), document, (7, 18)]
    host, packed = with_small_tiles(spec, "sm_90a"), documents.packed(lengths)
    inputs, grad_out = documents.random(spec, lengths, 1, 1)
    q, k, v, weight = inputs.arguments

    def results(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        """out, the log-sum-exp of rows, dq, dk, dv."""
        out, lse = host["forward"](q, k, v, weight, 0.25, *packed)
        grad_lse = grad_out[..., 0].T.contiguous()
        dq, dk, dv, _ = host["backward"](grad_out, grad_lse, q, k, v, weight, out, lse, 0.25, *packed)
        return out, lse.T, dq, dk, dv

    clean = results(q, k, v, grad_out)
    queries, keys = documents.rows_of(packed, 1)
    own = (queries, keys, keys, queries)
    spoilt = [_spoilt(x, part) for x, part in zip((q, k, v, grad_out), own, strict=True)]
    for ours, expected, part in zip(results(*spoilt), clean, (queries, queries, queries, keys, keys), strict=True):
        assert torch.equal(ours[part], expected[part])


def _spoilt(x: Tensor, kept: slice) -> Tensor:
    """NaN and infinity, but for some rows."""
    spoilt = torch.full_like(x, torch.nan)
    spoilt[::2] = torch.inf
    spoilt[kept] = x[kept]
    return spoilt
