"""The kernels of the lowering "strip" on a GPU: accuracy, reproducibility, memory. `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from on_chip import mixed_in_strips
from torch import Tensor

import mtagen
from mtagen.check import failures
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = torch.device("cuda")
Case = tuple[int, int, str, dict[str, Any]]


def layer(heads: int, kernel: tuple[int, int] | None = (6, 11), m: int | None = None) -> dict[str, Any]:
    """What the paper does in a layer: mixing before and after the softmax and, in every fourth, convolutions too."""
    return {
        "kernel": kernel,
        "mixed_heads": m or heads,
        "post_kernel": kernel,
        "post_mixed_heads": m or heads,
    }


CASES: dict[str, Case] = {  # heads, head dim, dtype, stages
    "16 heads of 64": (16, 64, "bf16", layer(16)),
    "10 heads of 128": (10, 128, "bf16", layer(10)),
    "16 heads of 96": (16, 96, "bf16", layer(16)),
    "16 heads of 128": (16, 128, "bf16", layer(16)),
    "mixing of 16 heads": (16, 64, "fp16", layer(16, None)),
    "mixing of 10 heads": (10, 128, "bf16", layer(10, None)),
    "convolutions alone": (4, 40, "fp16", {"kernel": (6, 11), "post_kernel": (5, 8)}),
    "groups of 2 after": (16, 128, "fp16", {"kernel": (6, 11), "post_mixed_heads": 2}),
    "groups of 2 of 64 after": (16, 64, "bf16", {"kernel": (6, 11), "post_mixed_heads": 2}),
    "groups of 4 of 32 after, all keys": (8, 32, "fp16", {"kernel": None, "post_mixed_heads": 4, "causal": False}),
    "convolution after, all keys": (4, 64, "bf16", {"kernel": None, "post_kernel": (6, 11), "causal": False}),
    "masked by output": (4, 40, "bf16", {**layer(4, (3, 4), 2), "mask": "output", "key_padding": "left"}),
    "a window": (16, 64, "bf16", layer(16) | {"window": (100, -1)}),
    "a window on both sides": (10, 128, "fp16", layer(10, None) | {"window": (200, 57), "causal": False}),
    "a window, masked by output": (4, 40, "bf16", layer(4, (3, 4), 2) | {"window": (70, -1), "mask": "output"}),
    "matrices of tokens": (16, 64, "bf16", layer(16) | {"dynamic_ranks": (2, 2), "post_dynamic_ranks": (2, 2)}),
    "matrices of keys after, of 8 heads": (
        8,
        64,
        "fp16",
        {"kernel": None, "post_mixed_heads": 8, "post_dynamic_ranks": (0, 1), "window": (77, 3), "causal": False},
    ),
    "fp32": (4, 64, "fp32", layer(4)),
    "groups that share no bundle": (144, 64, "bf16", {"kernel": None, "mixed_heads": 48, "post_mixed_heads": 36}),
}
REPEATED = ("16 heads of 64", "10 heads of 128", "mixing of 16 heads", "groups of 2 after", "matrices of tokens")

pytestmark += [pytest.mark.parametrize("backend", ["auto", "triton"])]  # auto: CUDA's kernels beside Triton's
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
repeated = pytest.mark.parametrize("case", [CASES[name] for name in REPEATED], ids=REPEATED)


def build(case: Case, backend: str, target: str | None = None) -> AttentionOp:
    """The op, whose forward pass is by strips even if the lowering "heads" is faster."""
    _, head_dim, dtype, stages = case
    op = mtagen.build(head_dim=head_dim, dtype=dtype, **stages, backend=backend, target=target)
    if op.plan.heads:
        op = assemble(mixed_in_strips(op.plan.spec, op.plan.target), torch_on_cpu=False)
    assert set(op.plan.strip) == {"forward", "backward", "decode"}
    served = "triton" if backend == "triton" or dtype == "fp32" else "cuda"
    assert {one.backend for one in op.plan.strip.values()} == {served}
    return op


def inputs(spec: Spec, sizes: Sizes) -> dict[str, Tensor]:
    return Sampler.for_timing(spec, sizes, CUDA).inputs().named


def train(op: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Out, the log-sum-exp and all gradients, through both."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out, lse = op(**leaves, return_lse=True)
    loss = out.float().square().sum() + lse.sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, [*leaves.values()])]


@every_case
def test_accuracy(case: Case, backend: str) -> None:
    """One row; more keys than queries, grouped; more queries than keys; many tiles."""
    heads, op = case[0], build(case, backend)
    sizes = (
        Sizes(8, heads, heads // 2, 1, 1),
        Sizes(2, heads, heads // 2, 113, 203),
        Sizes(1, heads, heads, 203, 113),
        Sizes(1, heads, heads, 1023, 1024),
    )
    assert not failures(op, op.plan.spec, CUDA, sizes if heads <= 16 else sizes[1:3])


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
@pytest.mark.parametrize("case", ["16 heads of 64", "10 heads of 128", "convolutions alone", "masked by output"])
def test_accuracy_of_targets_without_tma(case: str, target: str, backend: str) -> None:
    """What is planned for another GPU runs on this one: Triton's kernels load tiles by pointers."""
    heads, op = CASES[case][0], build(CASES[case], backend, target)
    sizes = (Sizes(8, heads, heads // 2, 1, 1), Sizes(2, heads, heads // 2, 113, 203), Sizes(1, heads, heads, 519, 518))
    assert not failures(op, op.plan.spec, CUDA, sizes)


@every_case
def test_accuracy_of_many_strips(case: Case, backend: str) -> None:
    """Strips of the fewest rows, of one sequence; then such strips of late rows, and longer ones of early rows."""
    built, heads = build(case, backend), case[0]
    for plane_bytes, sizes in (
        (2**12, Sizes(2, heads, heads // 2, 517, 530)),
        (128 * 1024 * heads * built.plan.spec.itemsize, Sizes(1, heads, heads, 1000, 1003)),
    ):
        plan = built.plan
        for one in plan.strip.values():
            plan = plan.replaced(replace(one, workspace_bytes=len(one.planes) * plane_bytes))
        op = assemble(plan, torch_on_cpu=False)
        assert not failures(op, plan.spec, CUDA, (sizes,))


@pytest.mark.parametrize("rows", [1024, 2048])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_head_of_keys(head_dim: int, rows: int, backend: str) -> None:
    """In one strip and in several. CUDA kernels that multiply planes divide the heads that share the key among CTAs."""
    plan, sizes = build((16, head_dim, "fp16", layer(16, None)), backend).plan, Sizes(1, 16, 1, 2048, 2051)
    for one in plan.strip.values():
        plan = plan.replaced(replace(one, workspace_bytes=len(one.planes) * rows * 2304 * 16 * plan.spec.itemsize))
    op = assemble(plan, torch_on_cpu=False)
    assert not failures(op, plan.spec, CUDA, (sizes,))
    tensors = inputs(plan.spec, sizes)
    assert all(map(torch.equal, train(op, tensors), train(op, tensors)))


@repeated
def test_bit_reproducible(case: Case, backend: str) -> None:
    op = build(case, backend)
    tensors = inputs(op.plan.spec, Sizes(2, case[0], case[0] // 2, 700, 750))
    first = train(op, tensors)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, train(op, tensors), strict=True))


@repeated
def test_memory_is_bounded(case: Case, backend: str) -> None:
    """A call takes its results, the workspace and sums, which grow with the length and not with its square."""
    op, heads = build(case, backend), case[0]
    spec, n = op.plan.spec, 4096
    tensors = inputs(spec, Sizes(1, heads, heads, n, n))
    train(op, tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    results = train(op, tensors)
    peak = torch.cuda.max_memory_allocated() - base
    returned = sum(x.numel() * x.element_size() for x in results)
    rows = heads * n * max(spec.head_dim, spec.value_head_dim) * 4  # one tensor like q in fp32
    assert peak <= returned + op.plan.strip["backward"].planes_bytes + 8 * rows + 2**26


def test_compiled(backend: str) -> None:
    """The backward pass reads what the forward pass keeps."""
    heads, _, _, stages = CASES["groups of 2 of 64 after"]
    op = mtagen.build(head_dim=64, **stages, backend=backend, deterministic=True)
    assert (op.plan.unmixed_columns > 0) == (backend == "auto" and op.plan.target == "sm_90a")
    tensors = inputs(op.plan.spec, Sizes(2, heads, heads // 2, 300, 310))
    compiled = torch.compile(lambda **x: op(**x), fullgraph=True)
    assert all(map(torch.equal, train(compiled, tensors), train(op, tensors)))


def test_decode_in_a_cuda_graph(backend: str) -> None:
    """Lengths are read on the device."""
    op = build(CASES["16 heads of 64"], backend)
    tensors = inputs(op.plan.spec, Sizes(2, 16, 4, op.plan.spec.context + 2, 3000))
    lengths = torch.tensor([17, 3000], dtype=torch.int32, device=CUDA)
    q_tail, k, v, *_ = tensors.values()
    weights = {name: x for name, x in tensors.items() if name not in "qkv"}
    op.decode(q_tail, k, v, **weights, cache_seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.decode(q_tail, k, v, **weights, cache_seqlens=lengths)
    lengths.copy_(torch.tensor([2110, 5], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, op.decode(q_tail, k, v, **weights, cache_seqlens=lengths))
