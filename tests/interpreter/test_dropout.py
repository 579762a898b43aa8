"""Dropout in the kernels of the lowering "lift", run on the CPU by Triton's interpreter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from host_functions import lift_module, with_small_tiles
from torch import Tensor

import mtagen
from mtagen.dropout import Dropout
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.measure.judge import eager_op, judge
from mtagen.planner.lift.tiling import Tile
from mtagen.spec import Spec

SEED = torch.tensor([0x0123456789ABCDEF, -0x0FEDCBA987654321])


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


CASES: list[tuple[tuple[int, int], dict[str, Any], float, str, Sizes]] = [
    ((6, 11), {}, 0.1, "sm_90a", Sizes(2, 2, 1, 9, 13)),
    ((6, 11), {"window": (20, -1)}, 0.9, "sm_80", Sizes(1, 2, 1, 45, 58)),
    ((5, 2), {"causal": False}, 0.1, "sm_90a", Sizes(1, 2, 1, 130, 41)),
    ((5, 2), {"causal": False, "window": (12, 3), "mask": "output"}, 0.5, "sm_90a", Sizes(2, 2, 1, 21, 5)),
    ((3, 4), {"mask": "output", "head_dim": 24, "dtype": "fp16"}, 0.1, "sm_80", Sizes(1, 2, 2, 37, 45)),
    ((2, 3), {"value_head_dim": 32}, 0.0, "sm_80", Sizes(1, 1, 1, 1, 1)),
]


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize(("kernel", "options", "p", "target", "sizes"), CASES, ids=str)
def test_accurate(kernel: tuple[int, int], options: dict[str, Any], p: float, target: str, sizes: Sizes) -> None:
    spec = Spec(kernel, **{"head_dim": 16, "dtype": "fp32"} | options, dropout=True)
    sampler = Sampler.for_checks(spec, sizes, torch.device("cpu"))
    kept = mtagen.dropout_mask(SEED, p, sizes.batch, sizes.heads, sizes.nq, sizes.nk)
    ours = documents.op(with_small_tiles(spec, target), spec, (), Dropout(SEED, p))
    eager = partial(eager_op(spec, return_lse=True), dropout_mask=kept, dropout_p=p)
    judged = judge(ours, eager, sampler.inputs(), sampler.outputs())
    assert not {name: x for name, x in judged.items() if not x.ok}


@pytest.mark.usefixtures("memory_starts_as_nan")
def test_documents() -> None:
    """Queries and keys count from the first of their document, heads through all documents."""
    spec, lengths = Spec((2, 3), 16, dtype="fp32", packed=True, dropout=True), [(3, 9), (5, 0), (0, 2), (19, 34)]
    assert not documents.failures(with_small_tiles(spec, "sm_90a"), spec, lengths, 2, 1, Dropout(SEED, 0.4))


@pytest.mark.parametrize(("pipeline", "target"), [("tiles", "sm_90a"), ("terms", "sm_80")])
def test_each_pass_keeps_what_the_mask_says(pipeline: str, target: str) -> None:
    """Scores are 0, so that all shares are positive; values, or gradients of outputs, tell them apart.

    There are two strips.
    """
    n_q, n_k, most, p = 133, 45, 136, 0.3
    spec = Spec((1, 1), 16, value_head_dim=most, dtype="fp16", causal=False, dropout=True)
    module = lift_module(spec, target, Tile(32, 32, pipeline=pipeline), workspace_bytes=2**10)
    q, k, weight = torch.zeros(2, 1, n_q, 16).half(), torch.zeros(2, 1, n_k, 16).half(), torch.ones(1, 1, 1)

    def one_hot(n: int) -> Tensor:
        return torch.eye(n, most).half().expand(2, 1, -1, -1)

    values, options = one_hot(n_k), (SEED, p)
    out, lse = module.forward(q, k, values, weight, 1.0, *options)
    dv = module.backward(one_hot(n_q), lse, q, k, values, weight, out, lse, 1.0, *options)[2]
    expected = mtagen.dropout_mask(SEED, p, 2, 1, n_q, n_k)
    assert torch.equal(out[..., :n_k] > 0, expected)
    assert torch.equal(dv[..., :n_q].mT > 0, expected)
