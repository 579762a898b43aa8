"""Calls of the lowering "strip" by recipes on a GPU. `pytest -m gpu`."""

from __future__ import annotations

import copy
import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import mtagen
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

EVERYTHING: dict[str, Any] = {"kernel": (6, 11), "mixed_heads": 4, "post_kernel": (6, 11), "post_mixed_heads": 4}
OPS: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "mixed": {"kernel": None, "mixed_heads": 4, "post_mixed_heads": 4},
    "pairs": {"kernel": (6, 11), "post_mixed_heads": 2},
    "everything in triton": EVERYTHING | {"backend": "triton"},
    "fp32": EVERYTHING | {"dtype": "fp32"},
}
SIZES = (Sizes(2, 4, 4, 300, 300), Sizes(1, 4, 2, 257, 131))


def module_of(op: AttentionOp) -> ModuleType:
    """The module of an op's backward pass."""
    kernels = library.executor_of(op._key).kernels
    assert kernels
    assert kernels.backward
    return sys.modules[kernels.backward.__module__]


def step(op: AttentionOp, sizes: Sizes, seed: int) -> list[Tensor]:
    """Results and gradients of a call with random arguments."""
    sampler = Sampler(
        op.plan.spec, sizes, torch.device("cuda"), torch.Generator("cuda").manual_seed(seed), seed % 2 == 0
    )
    inputs, grad_out = sampler.inputs(), sampler.outputs()
    leaves = {name: x.requires_grad_() for name, x in inputs.named.items()}
    out, lse = op(*(leaves[name] for name in "qkv"), **inputs.options(leaves), return_lse=True)
    grads = torch.autograd.grad((out, lse), [*leaves.values()], (grad_out, torch.ones_like(lse)))
    return [out.detach(), lse.detach(), *grads]


def drawn_weights(op: AttentionOp) -> dict[str, Tensor]:
    """Random weights of four heads."""
    arguments = op.plan.spec.weight_arguments.items()
    return {name: torch.randn(weight.extents({"H": 4}), device="cuda") / 8 for name, weight in arguments}


def equal(given: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(given, expected, strict=True))


def settled_memory() -> int:
    """Allocated bytes, once autograd's thread has let go of the last graph, which may be after its results are here."""
    torch.cuda.synchronize()
    time.sleep(0.5)
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.fixture(params=OPS.values(), ids=OPS, scope="module")
def op(request: pytest.FixtureRequest) -> AttentionOp:
    return mtagen.build(head_dim=64, **request.param)


def test_same_bits(op: AttentionOp) -> None:
    recipes = module_of(op).RECIPES
    for sizes in SIZES:
        with recipes.suspended():
            expected = [step(op, sizes, seed) for seed in range(8)]
        assert all(equal(step(op, sizes, seed), expected[seed]) for seed in range(8))
    assert recipes._recipes


def test_streams_and_threads(op: AttentionOp) -> None:
    expected = [step(op, SIZES[0], seed) for seed in range(8)]
    torch.cuda.synchronize()

    def on_stream(seed: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            given = step(op, SIZES[0], seed)
            torch.cuda.current_stream().synchronize()
        return equal(given, expected[seed])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(on_stream, [*range(8)] * 4))


def test_graphs(op: AttentionOp) -> None:
    q, weights = torch.zeros(1, 4, 300, 64, device="cuda", dtype=op.dtypes[0]), drawn_weights(op)
    for _ in range(2):
        op(q, q, q, **weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(q, q, q, **weights)
    for _ in range(2):
        q.normal_()
        graph.replay()
        with module_of(op).RECIPES.suspended():
            assert torch.equal(out, op(q, q, q, **weights))


def test_nothing_is_kept(op: AttentionOp) -> None:
    [step(op, SIZES[0], 0) for _ in range(3)]
    before = settled_memory()
    [step(op, SIZES[0], 0) for _ in range(3)]
    assert settled_memory() == before


def test_copies(op: AttentionOp) -> None:
    assert equal(step(copy.deepcopy(op), SIZES[0], 0), step(op, SIZES[0], 0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(op: AttentionOp) -> None:
    q, weights = torch.randn(1, 4, 300, 64, device="cuda", dtype=op.dtypes[0]), drawn_weights(op)
    there, weights_there = q.to("cuda:1"), {name: x.to("cuda:1") for name, x in weights.items()}
    for _ in range(3):
        assert torch.equal(op(there, there, there, **weights_there).cpu(), op(q, q, q, **weights).cpu())
