"""Sequences spread over two GPUs by NCCL: outputs and gradients in bf16, by the accuracy rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_distributed import over_ranks, random
from torch.distributed import ProcessGroup

import mtagen
from mtagen.distributed import ContextParallel
from mtagen.measure.judge import documents_op, eager_op, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
EVERYTHING: dict[str, Any] = {"kernel": (6, 11), "mixed_heads": 4, "post_kernel": (6, 11), "post_mixed_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "convolution": {"kernel": (6, 11)},
    "plain": {"kernel": None},
    "mixing": {"kernel": None, "mixed_heads": 4, "post_mixed_heads": 4},
    "pairs": {"kernel": (6, 11), "post_mixed_heads": 2},
    "everything": EVERYTHING,
    "window": {"kernel": (6, 11), "window": (100, -1)},
    "full": {"kernel": (6, 11), "causal": False},
    "plain, full": {"kernel": None, "causal": False},  # all keys come for the first chunk, nothing for the second
    "window to both sides": {"kernel": (6, 11), "causal": False, "window": (30, 20)},
    "everything in a window": EVERYTHING | {"window": (100, -1)},
}
LENGTHS = [300, 1, 0, 200, 140, 2]  # of documents


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks((2,), tmp_path_factory.mktemp("ranks") / "store", "nccl")
    yield processes
    processes.stop()


def built(stages: dict[str, Any]) -> mtagen.AttentionOp:
    return mtagen.build(**stages, head_dim=64, dtype="bf16", packed=True)


def judge_op(group: ProcessGroup, stages: dict[str, Any], balanced: bool) -> list[str]:
    op = built(stages)
    inputs, grad_out = random(op.plan.spec, 2, 2, 643, "cuda")
    call = over_ranks(ContextParallel(op, group, balanced=balanced), 2)
    judged = judge(call, eager_op(op.plan.spec), inputs, grad_out)
    return [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_accuracy(ranks: Ranks, name: str, balanced: bool) -> None:
    assert ranks.run(2, judge_op, CASES[name], balanced) == 2 * [[]]


def judge_documents(group: ProcessGroup, stages: dict[str, Any]) -> list[str]:
    op = built(stages)
    one, grad_out = random(op.plan.spec, 1, 2, sum(LENGTHS), "cuda")
    inputs = replace(one, **{name: getattr(one, name)[0].transpose(0, 1) for name in "qkv"})
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    call = over_ranks(ContextParallel(op, group), 0, cu_seqlens=cu_seqlens, max_seqlen=max(LENGTHS))
    eager = eager_op(op.plan.spec, return_lse=True)
    alone = documents_op(lambda *x, document, **weights: eager(*x, **weights), LENGTHS, LENGTHS)
    judged = judge(call, lambda *x, **weights: alone(*x, **weights)[0], inputs, grad_out[0].transpose(0, 1))
    return [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]


@pytest.mark.parametrize("name", ["convolution", "pairs", "everything"])
def test_documents(ranks: Ranks, name: str) -> None:
    assert ranks.run(2, judge_documents, CASES[name]) == 2 * [[]]
