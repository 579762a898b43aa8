"""The layers of the authors' trained models on a GPU, at their sizes: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import authors
import pytest
import torch
from torch import Tensor

from mtagen.accuracy import Comparison, compare
from mtagen.nn import MultiTokenAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = torch.device("cuda")
SIZES: dict[str, tuple[int, int]] = {"300M": (1024, 16), "550M": (1280, 10), "830M": (1536, 16), "1B": (2048, 16)}
KERNELS: dict[str, dict[str, Any]] = {
    "with convolutions": {"kernel": (6, 11), "post_kernel": (6, 11)},
    "without convolutions": {"kernel": None},
}
N = 512
every_size = pytest.mark.parametrize("size", SIZES)
every_kernel = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)


class Case:
    """A layer in bf16, its parameters, and tokens."""

    def __init__(self, size: str, kernels: dict[str, Any], batch: int = 2, n: int = N) -> None:
        dim, heads = SIZES[size]
        mixing = {"mixed_heads": heads, "post_mixed_heads": heads}
        self.options = kernels | mixing | {"group_norm": True, "gate": "scalar", "head_dim": dim // heads}
        random = authors.random_state(self.options, heads, dim)
        self.state = {name: y.to(CUDA, torch.bfloat16) for name, y in random.items()}
        self.layer = MultiTokenAttention(dim, heads, **self.options, device=CUDA, dtype=torch.bfloat16)
        self.layer.load_state_dict(self.state)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(batch, n, dim, generator=generator).to(CUDA, torch.bfloat16)

    def outputs(self, dtype: torch.dtype, x: Tensor | None = None) -> Tensor:
        """What eager PyTorch computes in this dtype from the same numbers."""
        state = {name: y.to(dtype) for name, y in self.state.items()}
        with torch.no_grad():
            return authors.layer(state, (self.x if x is None else x).to(dtype), self.options)

    def judge(self, ours: Tensor, x: Tensor | None = None) -> Comparison:
        """Outputs by the accuracy rule."""
        return compare(ours, self.outputs(torch.bfloat16, x), self.outputs(torch.float64, x))


@every_kernel
@every_size
def test_training(size: str, kernels: dict[str, Any]) -> None:
    case = Case(size, kernels)
    x = case.x.clone().requires_grad_()
    out = case.layer(x)
    out.square().sum().backward()
    ours = {"out": out.detach(), "x": x.grad} | {name: y.grad for name, y in case.layer.named_parameters()}
    eager, exact = (
        authors.train({name: y.to(dtype) for name, y in case.state.items()}, case.x.to(dtype), case.options)
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert not authors.failures(ours, eager, exact)


@every_kernel
@every_size
@pytest.mark.parametrize(
    "schedule",
    [[N], [N - 20, *[1] * 20], [5, 200, 1, 8, 100, *[2] * 99]],
    ids=["at once", "token by token", "in parts"],
)
def test_generation(size: str, kernels: dict[str, Any], schedule: list[int]) -> None:
    case = Case(size, kernels)
    cache = case.layer.new_cache(2, N + 5)
    with torch.no_grad():
        out = torch.cat([case.layer(part, cache=cache) for part in case.x.split(schedule, 1)], 1)
    judged = case.judge(out)
    assert judged.ok, judged


@every_kernel
def test_documents(kernels: dict[str, Any]) -> None:
    case, lengths = Case("300M", kernels, batch=1), [200, 1, 0, 311]
    cu_seqlens = torch.tensor([0, *lengths], device=CUDA).cumsum(0).to(torch.int32)
    with torch.no_grad():
        out = case.layer(case.x, cu_seqlens=cu_seqlens)
    for ours, x in zip(out.split(lengths, 1), case.x.split(lengths, 1), strict=True):
        assert not x.numel() or case.judge(ours, x).ok


@every_kernel
def test_autocast(kernels: dict[str, Any]) -> None:
    """Parameters of fp32; kernels are of bf16 by default."""
    case = Case("300M", kernels)
    dim, heads = SIZES["300M"]
    layer = MultiTokenAttention(dim, heads, **case.options, device=CUDA)
    layer.load_state_dict(case.state)
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(case.x.float())
    out.square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert case.judge(out).ok
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@every_kernel
def test_compile(kernels: dict[str, Any]) -> None:
    """Training, and steps of generation."""
    case = Case("300M", kernels)
    torch._dynamo.reset()
    out = torch.compile(case.layer, fullgraph=True)(case.x)
    out.square().sum().backward()
    assert case.judge(out.detach()).ok
    assert all(parameter.grad.isfinite().all() for parameter in case.layer.parameters())
    step = torch.compile(lambda x, cache: case.layer(x, cache=cache), fullgraph=True, mode="reduce-overhead")
    cache = case.layer.new_cache(2, N)
    with torch.no_grad():
        outs = [case.layer(case.x[:, : N - 20], cache=cache)]
        for n in range(N - 20, N):
            torch.compiler.cudagraph_mark_step_begin()
            outs.append(step(case.x[:, n : n + 1], cache).clone())
    assert case.judge(torch.cat(outs, 1)).ok


@every_kernel
def test_captured_step(kernels: dict[str, Any]) -> None:
    """One CUDA graph serves all lengths."""
    case = Case("300M", kernels)
    cache, x = case.layer.new_cache(2, N), case.x[:, :1].clone()
    stream = torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            case.layer(x, cache=case.layer.new_cache(2, N))  # what the first call allocates is not captured
        torch.cuda.current_stream().wait_stream(stream)
        outs = [case.layer(case.x[:, : N - 20], cache=cache)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.layer(x, cache=cache)
        for n in range(N - 20, N):
            x.copy_(case.x[:, n : n + 1])
            graph.replay()
            outs.append(out.clone())
            if n == N - 9:  # eager calls know what replays added
                outs += [case.layer(case.x[:, N - 8 : N - 4], cache=cache)]
                outs += [case.layer(case.x[:, N - 4 :], cache=cache)]
                break
    assert cache.read_longest() == N
    assert case.judge(torch.cat(outs, 1)).ok
