"""CUDA's kernels of the lowering "strip" on a CPU: what the mask hides changes no bit of other results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hidden
import problems
import pytest
import torch
from hidden import Call
from test_cuda_strip import build
from torch import Tensor

from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {  # heads and stages
    "16 heads mix": (16, {"kernel": None, "mixed_heads": 16}),
    "all stages in a window": (
        2,
        {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 2, "window": (5, 0)},
    ),
    "parameters and a sink": (
        4,
        {"kernel": None, "mixed_heads": 2, "window": (9, -1), "sink": True, **problems.READ},
    ),
    "pairs in a window on both sides": (
        2,
        {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2, "causal": False, "window": (9, 5)},
    ),
}


@pytest.mark.parametrize(("heads", "stages"), PIPELINES.values(), ids=PIPELINES)
def test_training(
    heads: int, stages: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    op = build(folder, stages)
    n_q, n_k, cut = 33, 37, 20
    inputs = Sampler.for_checks(op.plan.spec, Sizes(1, heads, heads, n_q, n_k), torch.device("cpu")).inputs()

    def results(call: Call) -> dict[str, Tensor]:
        *qkv, grad_out = call
        leaves = [x.detach().requires_grad_() for x in qkv]
        out, lse = op(*leaves, **inputs.options(inputs.named), scale=0.25, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    grad_out = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(1)).to(inputs.q.dtype)
    call = Call(inputs.q, inputs.k, inputs.v, grad_out)
    assert not hidden.failures(results, call, hidden.edges(op.plan.spec, n_q, n_k, cut))
