"""The generated kernels on a GPU: accuracy over a grid of specs, and what a torch op must survive. `pytest -m gpu`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mtagen
from mtagen.call import NO_LEARNED
from mtagen.check import failures
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp
from mtagen.ops.executor import Executor
from mtagen.planner import choice, get_target
from mtagen.runtime import nvrtc
from mtagen.runtime.load import load, plan_key
from mtagen.runtime.offline import launches

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BACKENDS = {  # and targets: Triton's kernels of sm_80 take pointers instead of descriptors
    "cuda": {"backend": "cuda"},
    "triton": {"backend": "triton"},
    "triton by pointers": {"backend": "triton", "target": "sm_80"},
}
DTYPES = ("bf16", "fp16", "fp32")
SIZES = (
    Sizes(8, 8, 4, 1, 1),  # enough rows that eager is not exact by luck
    Sizes(2, 8, 8, 67, 67),
    Sizes(2, 4, 2, 113, 203),  # ragged, grouped queries
    Sizes(1, 2, 1, 203, 113),  # when causal, most queries see no key
    Sizes(4, 8, 4, 799, 3),
    Sizes(1, 3, 1, 1023, 1024),  # many tiles
)
GRID = [
    *itertools.product([(1, 1), (6, 11), (5, 2)], [16, 64, 80, 128, 256], DTYPES, [True, False], ["both"], ["source"]),
    *itertools.product(
        [(3, 3), (2, 9), (7, 7), (11, 1), (1, 7), (16, 17)],
        [64],
        ["bf16"],
        [True, False],
        ["both"],
        ["source"],
    ),
    *itertools.product([(6, 11), (4, 3)], [64], ["bf16"], [True], ["left", "right", "both"], ["source", "output"]),
    ((16, 17), 128, "bf16", True, "both", "source"),
    ((6, 11), 24, "fp16", True, "both", "source"),
    ((6, 11), 192, "bf16", True, "both", "source"),
]


CUDA_GRID = [
    *itertools.product(
        [(6, 11)], [16, 32, 48, 64, 80, 96, 128, 192, 256], ["bf16"], [True, False], ["both"], ["source"]
    ),
    *itertools.product([(6, 11)], [64, 128], ["fp16"], [True, False], ["both"], ["source"]),
    *itertools.product(
        [(1, 1), (3, 3), (7, 7), (11, 11), (2, 9), (11, 1), (1, 7), (5, 2), (16, 17)],
        [64],
        ["bf16"],
        [True, False],
        ["both"],
        ["source"],
    ),
    *itertools.product([(6, 11), (4, 3)], [64], ["bf16"], [True], ["left", "right", "both"], ["source", "output"]),
    ((3, 3), 128, "bf16", True, "both", "source"),
    ((16, 17), 128, "bf16", True, "both", "source"),
    # Tall kernels take most registers, and what ptxas makes of them was wrong for one: NVRTC 13.0, (13, 5), d = 128.
    *itertools.product(
        [(7, 7), (8, 8), (8, 15), (9, 4), (10, 13), (11, 11), (12, 7), (13, 5), (14, 17), (15, 3), (16, 2)],
        [128],
        ["bf16"],
        [True, False],
        ["both"],
        ["source"],
    ),
    *itertools.product([(8, 8), (13, 5), (15, 3)], [64], ["bf16"], [True, False], ["both"], ["source"]),
    (None, 64, "bf16", True, "both", "source"),
]


@pytest.fixture
def prefers_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes CUDA for every pass that it can do, not only where it is faster."""
    monkeypatch.setattr(choice, "cuda_over_triton", lambda *_: (0.0, "a test"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``torch.empty`` gives is filled with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_accurate(op: AttentionOp, sizes: tuple[Sizes, ...] = SIZES) -> None:
    assert not failures(op, op.plan.spec, torch.device("cuda"), sizes)


@pytest.mark.parametrize(("kernel", "head_dim", "dtype", "causal", "key_padding", "mask"), GRID)
def test_accuracy(
    kernel: tuple[int, int], head_dim: int, dtype: str, causal: bool, key_padding: str, mask: str
) -> None:
    op = mtagen.build(
        kernel, head_dim, dtype=dtype, causal=causal, key_padding=key_padding, mask=mask, backend="triton"
    )
    assert_accurate(op)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("prefers_cuda", "poisoned")
@pytest.mark.parametrize(("kernel", "head_dim", "dtype", "causal", "key_padding", "mask"), CUDA_GRID)
def test_accuracy_of_cuda(
    kernel: tuple[int, int] | None, head_dim: int, dtype: str, causal: bool, key_padding: str, mask: str
) -> None:
    op = mtagen.build(
        kernel, head_dim, dtype=dtype, causal=causal, key_padding=key_padding, mask=mask, deterministic=False
    )
    assert "forward" in op.plan.tile
    assert op.plan["backward"].lowering == ("tile" if head_dim <= 128 else "strip")
    assert_accurate(op)


@pytest.mark.usefixtures("prefers_cuda", "poisoned")
@pytest.mark.parametrize("options", [{}, {"window": (100, -1)}, {"causal": False}], ids=str)
def test_accuracy_of_cuda_with_values_of_another_head_dim(options: dict[str, Any]) -> None:
    op = mtagen.build((6, 11), 192, value_head_dim=128, **options)
    assert op.plan["backward"].lowering == "strip"
    assert_accurate(op)


WINDOWS: dict[str, dict[str, Any]] = {
    "paper": {"kernel": (6, 11), "head_dim": 128, "window": (100, -1)},
    "narrow": {"kernel": (6, 11), "head_dim": 64, "window": (3, 2), "causal": False},
    "by output": {"kernel": (4, 3), "head_dim": 64, "window": (40, 30), "causal": False, "mask": "output"},
    "earlier keys only": {"kernel": (5, 2), "head_dim": 64, "window": (64, -1), "causal": False},
    "plain": {"kernel": None, "head_dim": 128, "window": (256, -1)},
}


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("prefers_cuda", "poisoned")
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
def test_windows(options: dict[str, Any], backend: str) -> None:
    op = mtagen.build(**options, backend=backend)
    assert bool(op.plan.tile) == (backend == "auto")
    assert_accurate(op)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("prefers_cuda", "poisoned")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_around_the_edges_of_tiles(causal: bool, deterministic: bool) -> None:
    op = mtagen.build((6, 11), 64, causal=causal, deterministic=deterministic)
    rows, keys = op.plan.tile["forward"].geometry.owned, op.plan.tile["backward"].geometry.owned
    lengths = sorted({n + step for n in (64, 128, rows, 2 * rows, keys, 2 * keys) for step in (-1, 0, 1)})
    assert_accurate(op, tuple(Sizes(1, 2, 1, n, n) for n in lengths))
    assert_accurate(op, tuple(Sizes(1, 2, 1, rows, n) for n in lengths[::4]))


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
@pytest.mark.parametrize(
    ("kernel", "head_dim", "options"),
    [
        *itertools.product([(6, 11), (3, 3), (1, 1)], [64, 128], [{}]),
        ((6, 11), 80, {"dtype": "fp16"}),
        ((5, 2), 64, {"causal": False}),
        ((4, 3), 40, {"mask": "output", "key_padding": "right", "dtype": "fp32"}),
    ],
    ids=str,
)
def test_triton_for_targets_without_tma(
    kernel: tuple[int, int], head_dim: int, options: dict[str, Any], target: str
) -> None:
    """What is planned for another GPU runs on this one: tiles are loaded by pointers."""
    op = mtagen.build(kernel, head_dim, **options, backend="triton", target=target)
    assert not get_target(op.plan.target).tensor_descriptors
    assert_accurate(op)


@pytest.mark.usefixtures("prefers_cuda")
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_value_head_dim_of_its_own(backend: str) -> None:
    assert_accurate(mtagen.build((6, 11), 64, value_head_dim=128, backend=backend))


@pytest.mark.parametrize("kernel", [(6, 11), (5, 2)])
def test_strips(kernel: tuple[int, int]) -> None:
    """A workspace of a few rows: the backward pass carries rows of g from strip to strip."""
    built = mtagen.build(kernel, 64, backend="triton")
    assert_accurate(with_workspace(built, 2**20))


def with_workspace(op: AttentionOp, workspace_bytes: int) -> AttentionOp:
    plan = op.plan.replaced(replace(op.plan.lift["backward"], workspace_bytes=workspace_bytes))
    sources = render(plan)
    key = plan_key(plan, sources)
    library.register(key, Executor(plan.spec, load(plan, sources), kernels_on_cpu=False, torch_on_cpu=False))
    return AttentionOp(plan, key, (torch.bfloat16,))


def inputs(n: int = 300, heads: int = 4, kv_heads: int = 2, dim: int = 64, device: str = "cuda") -> list[Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, heads, n, dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, kv_heads, n, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    return [q, k, v, torch.randn(heads, 6, 11, device=device) / 8]


@pytest.fixture(scope="module", params=BACKENDS.values(), ids=BACKENDS)
def op(request: pytest.FixtureRequest) -> AttentionOp:
    return mtagen.build((6, 11), 64, **request.param, deterministic=True)


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def test_bit_reproducible(op: AttentionOp) -> None:
    tensors = inputs()
    first = gradients(op, tensors)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(op, tensors), strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_heads_of_a_long_sequence_come_in_sections(causal: bool) -> None:
    """With the bits of calls that have too few heads for it, but for sums of dq, whose order is that of time."""
    built, (q, k, v, weight) = mtagen.build((6, 11), 64, causal=causal), inputs(65536, 8, 4)
    out, dq, dk, dv, dweight = gradients(built, [q, k, v, weight])
    for kv_head in range(4):
        heads, kv_heads = slice(2 * kv_head, 2 * kv_head + 2), slice(kv_head, kv_head + 1)
        whole = out[:, heads], dq[:, heads], dk[:, kv_heads], dv[:, kv_heads], dweight[heads]
        part = gradients(built, [q[:, heads], k[:, kv_heads], v[:, kv_heads], weight[heads]])
        assert all(torch.equal(whole[i], part[i]) for i in (0, 2, 3, 4))
        torch.testing.assert_close(whole[1], part[1], rtol=2**-7, atol=2**-7 * part[1].abs().max().item())


def test_compile_fullgraph(op: AttentionOp) -> None:
    tensors = inputs()
    compiled = torch.compile(lambda *x: op(*x), fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, tensors), gradients(op, tensors), strict=True))


def test_opcheck(op: AttentionOp) -> None:
    leaves = [x.requires_grad_() for x in inputs(70)]
    torch.library.opcheck(torch.ops.mtagen.forward.default, (*leaves, None, None, None, *NO_LEARNED, 0.125, op._key))
    q_tail, k, v, weight = (x.detach() for x in inputs(70))
    given = (q_tail[:, :, -7:], k, v, weight, None, None, None, *NO_LEARNED, None, 0.125, 0, op._key)
    torch.library.opcheck(torch.ops.mtagen.decode.default, given)


def test_autocast(op: AttentionOp) -> None:
    q, k, v, weight = inputs()
    with torch.autocast("cuda", torch.bfloat16):
        out = op(q.float(), k.float(), v.float(), weight)
    assert torch.equal(out, op(q, k, v, weight))


def test_cuda_graph(op: AttentionOp) -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    grad = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        out = op(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_decode_in_a_cuda_graph(op: AttentionOp) -> None:
    q, k, v, weight = inputs()
    lengths = torch.tensor([17, 300], dtype=torch.int32, device="cuda")
    q_tail = q[:, :, -6:].contiguous()
    op.decode(q_tail, k, v, weight, cache_seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.decode(q_tail, k, v, weight, cache_seqlens=lengths)
    lengths.copy_(torch.tensor([211, 5], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, op.decode(q_tail, k, v, weight, cache_seqlens=lengths))


def test_other_stream(op: AttentionOp) -> None:
    tensors = inputs()
    torch.cuda.synchronize()
    expected = gradients(op, tensors)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = gradients(op, tensors)
        torch.cuda.current_stream().synchronize()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device(op: AttentionOp) -> None:
    tensors = inputs()
    expected = gradients(op, tensors)
    ours = gradients(op, [x.to("cuda:1") for x in tensors])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, expected, strict=True))


def test_packed_projection_is_read_in_place(op: AttentionOp, recwarn: pytest.WarningsRecorder) -> None:
    packed = torch.randn(2, 200, 3, 4, 64, device="cuda", dtype=torch.bfloat16)  # (B, N, 3, H, D)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    weight = inputs()[3]
    out = op(q, k, v, weight)
    assert not [warning for warning in recwarn if "copied" in str(warning.message)]
    assert torch.equal(out, op(q.contiguous(), k.contiguous(), v.contiguous(), weight))


def test_unaligned_rows_are_copied_with_a_warning(op: AttentionOp) -> None:
    q, k, v, weight = inputs()
    odd = torch.zeros(*q.shape[:3], 65, device="cuda", dtype=q.dtype)[..., 1:]
    odd.copy_(q)
    with pytest.warns(RuntimeWarning, match="16"):
        out = op(odd, k, v, weight)
    assert torch.equal(out, op(q, k, v, weight))


def test_gradient_of_any_layout(op: AttentionOp) -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    out = op(*leaves)
    sums = torch.autograd.grad(out.sum(), leaves, retain_graph=True)  # an expanded, zero-stride gradient
    ones = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(sums, ones, strict=True))


def test_new_lengths_compile_nothing(op: AttentionOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel was compiled by build: later calls of other sizes and layouts must find it."""
    monkeypatch.setattr(nvrtc, "compile_cubin", None)
    plan = op.plan
    kernels = [launch.kernel for launch in launches(plan)] if plan.lift else []

    def compiled() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    before = compiled()
    assert all(before)
    for n, heads, kv_heads in ((1, 1, 1), (16, 2, 2), (333, 4, 2), (1024, 3, 1)):
        tensors = inputs(n, heads, kv_heads)
        gradients(op, tensors)
        for rows in (6, 13):
            q_tail = torch.randn(2, heads, rows, 64, device="cuda", dtype=torch.bfloat16)
            op.decode(q_tail, *tensors[1:], cache_seqlens=torch.full((2,), n, dtype=torch.int32, device="cuda"))
            op.decode(q_tail, *tensors[1:])
    assert compiled() == before


def test_memory_does_not_grow_with_the_square(op: AttentionOp) -> None:
    def extra(n: int) -> int:
        tensors = inputs(n, 16, 16)
        gradients(op, tensors)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        gradients(op, tensors)
        return torch.cuda.max_memory_allocated() - base

    assert extra(32768) < 2.5 * extra(16384)


@pytest.mark.usefixtures("prefers_cuda")
@pytest.mark.parametrize(("backend", "target"), [("auto", None), ("triton", None), ("triton", "sm_80")])
def test_long_offsets_are_64_bit(backend: str, target: str | None) -> None:
    """More than 2^31 elements in q: the last head's result must equal that head computed alone."""
    op = mtagen.build((2, 3), 256, backend=backend, target=target)
    heads, n = 2**31 // (256 * 16384) + 2, 16384
    q = torch.randn(1, heads, n, 256, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, n, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(heads, 2, 3, device="cuda")
    out = op(q, k, v, weight)
    assert torch.equal(out[:, -1:], op(q[:, -1:], k, v, weight[-1:]))
