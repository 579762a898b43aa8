"""What the executor passes to generated kernels, whatever it was given, and what it makes of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import call_of, step_of
from torch import Tensor

from mtagen.call import Call, Documents, Step
from mtagen.cpu import attention, pipeline
from mtagen.ops.executor import Executor
from mtagen.runtime.load import Passes
from mtagen.spec import Spec

SPEC = Spec((2, 3), 16, 24, dtype="fp16")
B, H, HKV, NQ, NK, NEW, SCALE = 2, 2, 1, 5, 7, 2, 0.3
DTYPE = torch.float16


class StrictKernels:
    """Generated kernels, played by PyTorch: they refuse what the real ones would read or divide wrongly.

    Args:
        spec: what they were generated for.

    Attributes:
        calls: how often each pass was called.
        splits: what decode got as its number of splits.
    """

    def __init__(self, spec: Spec = SPEC) -> None:
        self.spec = spec
        self.calls = {"forward": 0, "backward": 0, "decode": 0}
        self.splits: int | None = None

    def passes(self) -> Passes:
        return Passes(self.forward, self.backward, self.decode)

    def taps(self, q: Tensor, weight: Tensor | None) -> Tensor:
        """The weight that a pass got; of plain attention, which has none, ones."""
        assert (weight is None) == (self.spec.kernel is None)
        if weight is None:
            return torch.ones(q.shape[1], 1, 1)
        assert_dense_fp32(weight)
        return weight

    def forward(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        self.calls["forward"] += 1
        assert_rows(q, k, v)
        return attention.forward(self.spec, call_of(SPEC, q, k, v, [self.taps(q, weight)], scale))

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        out: Tensor,
        lse: Tensor,
        scale: float,
        *,
        deterministic: bool,
    ) -> tuple[Tensor, ...]:
        self.calls["backward"] += 1
        assert_rows(grad_out, q, k, v)
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        assert_dense_fp32(grad_lse, lse)
        assert out.is_contiguous()
        call = call_of(SPEC, q, k, v, [self.taps(q, weight)], scale)
        return attention.backward(self.spec, call, grad_out, grad_lse, out, lse)

    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor | None,
        scale: float,
        cache_seqlens: Tensor | None,
        num_splits: int | None,
    ) -> tuple[Tensor, Tensor]:
        self.calls["decode"] += 1
        assert_rows(q_tail, k_cache, v_cache)
        taps = self.taps(q_tail, weight)
        assert cache_seqlens is None or (cache_seqlens.is_contiguous() and cache_seqlens.dtype == torch.int32)
        self.splits = num_splits
        weights = [taps] if self.spec.kernel else []
        return pipeline.decode(self.spec, step_of(self.spec, q_tail, k_cache, v_cache, weights, scale, cache_seqlens))


def assert_rows(*tensors: Tensor) -> None:
    """There is something to read, in rows of 16-byte vectors, each at a place of its own."""
    for x in tensors:
        assert x.numel()
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            assert size == 1 or (stride > 0 and stride * x.element_size() % 16 == 0)


def assert_dense_fp32(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert x.data_ptr() % 16 == 0


@pytest.fixture
def kernels() -> StrictKernels:
    return StrictKernels()


@pytest.fixture
def executor(kernels: StrictKernels) -> Executor:
    return Executor(SPEC, kernels.passes(), kernels_on_cpu=True, torch_on_cpu=False)


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def operands(nq: int = NQ, nk: int = NK, weight_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, weight."""
    shapes = (B, H, nq, SPEC.head_dim), (B, HKV, nk, SPEC.head_dim), (B, HKV, nk, SPEC.value_head_dim)
    return [*(random(*shape) for shape in shapes), random(H, *SPEC.kernel, dtype=weight_dtype)]


def call(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor, documents: Documents | None = None) -> Call:
    """A call, with filters or without."""
    return call_of(SPEC if weights else replace(SPEC, kernel=None), q, k, v, weights, SCALE, documents)


def step(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor, lengths: Tensor | None = None, splits: int = 0) -> Step:
    """A step of decoding, with filters or without."""
    return step_of(SPEC if weights else replace(SPEC, kernel=None), q, k, v, weights, SCALE, lengths, splits)


# Layouts of the same values: as they are, and such as kernels cannot read.


def tokens_first(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def shifted(x: Tensor) -> Tensor:
    """Starts one element after a multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def padded(x: Tensor) -> Tensor:
    """Rows one element longer than what is used of them."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def expanded(axis: int) -> Callable[[Tensor], Tensor]:
    """The first entry along an axis stands for all; its stride is 0."""
    return lambda x: x.narrow(axis, 0, 1).expand(x.shape)


LAYOUTS = {
    "dense": torch.clone,
    "tokens first": tokens_first,
    "shifted": shifted,
    "padded": padded,
    **{f"expanded {name}": expanded(axis) for axis, name in enumerate(("batch", "heads", "rows"))},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@every_layout
@pytest.mark.parametrize("index", range(3), ids="qkv")
@pytest.mark.filterwarnings("ignore:.*rows that do not start at multiples of 16 bytes:RuntimeWarning")
def test_operands_of_any_layout(executor: Executor, index: int, layout: Callable[[Tensor], Tensor]) -> None:
    *qkv, weight = operands()
    qkv[index] = layout(qkv[index])
    dense = [x.contiguous() for x in qkv]
    out, lse = executor.forward(call(*qkv, weight))
    assert_equal((out, lse), attention.forward(SPEC, call(*dense, weight)))
    grads = random(*out.shape), random(*lse.shape, dtype=torch.float32)
    got = executor.backward(call(*qkv, weight), *grads, out, lse)
    assert_equal(got, attention.backward(SPEC, call(*dense, weight), *grads, out, lse))


@every_layout
def test_gradients_of_any_layout(executor: Executor, layout: Callable[[Tensor], Tensor]) -> None:
    tensors = operands()
    out, lse = executor.forward(call(*tensors))
    grad_out, grad_lse = layout(random(*out.shape)), layout(random(*lse.shape, 8, dtype=torch.float32))[..., 0]
    got = executor.backward(call(*tensors), grad_out, grad_lse, out, lse)
    dense = grad_out.contiguous(), grad_lse.contiguous()
    assert_equal(got, attention.backward(SPEC, call(*tensors), *dense, out, lse))


def test_the_gradient_of_a_sum(executor: Executor, kernels: StrictKernels) -> None:
    """``out.sum().backward()`` gives one number the shape of the output; all its strides are 0."""
    tensors = operands()
    out, lse = executor.forward(call(*tensors))
    one = torch.ones((), dtype=out.dtype).expand(out.shape), torch.zeros(()).expand(lse.shape)
    got = executor.backward(call(*tensors), *one, out, lse)
    assert kernels.calls["backward"] == 1
    assert_equal(got, attention.backward(SPEC, call(*tensors), torch.ones_like(out), torch.zeros_like(lse), out, lse))


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("layout", [torch.clone, shifted, padded])
def test_weights_of_any_layout_and_dtype(
    executor: Executor, layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The kernels read fp32; the gradient has the weight's own dtype."""
    q, k, v, weight = operands(weight_dtype=dtype)
    weight = layout(weight)
    exact = weight.float().contiguous()
    out, lse = executor.forward(call(q, k, v, weight))
    assert_equal((out, lse), attention.forward(SPEC, call(q, k, v, exact)))
    grads = random(*out.shape), torch.zeros_like(lse)
    got = executor.backward(call(q, k, v, weight), *grads, out, lse)
    *expected, dweight = attention.backward(SPEC, call(q, k, v, exact), *grads, out, lse)
    assert_equal(got, (*expected, dweight.to(dtype)))
    tail = random(B, H, SPEC.cq - 1 + NEW, SPEC.head_dim)
    got = executor.decode(step(tail, k, v, weight))
    assert_equal(got, pipeline.decode(SPEC, step(tail, k, v, exact)))


def test_without_a_gradient_of_lse(executor: Executor) -> None:
    """Kernels and PyTorch's ops get no zeros from autograd, and calculate as with zeros."""
    q, k, v, weight = operands()
    out, lse = executor.forward(call(q, k, v, weight))
    grad_out = random(*out.shape)
    for one in (executor, Executor(SPEC, None, kernels_on_cpu=False, torch_on_cpu=True)):
        got = one.backward(call(q, k, v, weight), grad_out, None, out, lse)
        assert_equal(got, one.backward(call(q, k, v, weight), grad_out, torch.zeros_like(lse), out, lse))


def test_plain_attention_has_no_weight() -> None:
    """The kernels take a weight in any case, which is None, and its gradient is none of the op's."""
    spec = replace(SPEC, kernel=None)
    executor = Executor(spec, StrictKernels(spec).passes(), kernels_on_cpu=True, torch_on_cpu=False)
    q, k, v, _ = operands()
    tap = torch.ones(H, 1, 1)
    out, lse = executor.forward(call(q, k, v))
    assert_equal((out, lse), attention.forward(spec, call(q, k, v, tap)))
    grads = random(*out.shape), random(*lse.shape, dtype=torch.float32)
    got = executor.backward(call(q, k, v), *grads, out, lse)
    assert_equal(got, attention.backward(spec, call(q, k, v, tap), *grads, out, lse)[:3])
    got = executor.decode(step(q, k, v))
    assert_equal(got, pipeline.decode(spec, step(q, k, v)))


@every_layout
@pytest.mark.parametrize("index", range(3), ids=["q_tail", "k_cache", "v_cache"])
@pytest.mark.filterwarnings("ignore:.*rows that do not start at multiples of 16 bytes:RuntimeWarning")
def test_decode_of_any_layout(executor: Executor, index: int, layout: Callable[[Tensor], Tensor]) -> None:
    _, k, v, weight = operands()
    tensors = [random(B, H, SPEC.cq - 1 + NEW, SPEC.head_dim), k, v]
    tensors[index] = layout(tensors[index])
    dense = [x.contiguous() for x in tensors]
    got = executor.decode(step(*tensors, weight))
    assert_equal(got, pipeline.decode(SPEC, step(*dense, weight)))


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([7, 4], dtype=torch.int32),
        torch.tensor([[7, 0], [4, 0]], dtype=torch.int32)[:, 0],
        torch.tensor([6], dtype=torch.int32).expand(B),
    ],
    ids=["dense", "column", "expanded"],
)
def test_lengths_of_any_stride(executor: Executor, lengths: Tensor) -> None:
    _, k, v, weight = operands()
    tail = random(B, H, SPEC.cq - 1 + NEW, SPEC.head_dim)
    got = executor.decode(step(tail, k, v, weight, lengths=lengths))
    assert_equal(got, pipeline.decode(SPEC, step(tail, k, v, weight, lengths=lengths)))


@pytest.mark.parametrize(("asked", "passed"), [(0, None), (1, 1), (5, 5)])
def test_no_number_of_splits_leaves_it_to_the_plan(
    executor: Executor, kernels: StrictKernels, asked: int, passed: int | None
) -> None:
    _, k, v, weight = operands()
    executor.decode(step(random(B, H, SPEC.cq, SPEC.head_dim), k, v, weight, splits=asked))
    assert kernels.splits == passed


def test_rows_that_are_copied_are_warned_of(executor: Executor) -> None:
    q, k, v, weight = operands()
    with pytest.warns(RuntimeWarning, match="k has strides .* are copied before each call"):
        executor.forward(call(q, padded(k), v, weight))


# Nothing to launch.


@pytest.mark.parametrize(("nq", "nk"), [(0, NK), (NQ, 0), (0, 0)])
@pytest.mark.parametrize("weight_dtype", [torch.float32, DTYPE])
def test_no_scores(executor: Executor, kernels: StrictKernels, nq: int, nk: int, weight_dtype: torch.dtype) -> None:
    tensors = operands(nq, nk, weight_dtype)
    out, lse = executor.forward(call(*tensors))
    assert_equal((out, lse), attention.forward(SPEC, call(*tensors)))
    got = executor.backward(call(*tensors), out, lse, out, lse)
    assert_equal(got, tuple(torch.zeros_like(x) for x in tensors))
    assert not any(kernels.calls.values())


@pytest.mark.parametrize(
    ("cu_seq_q", "cu_seq_k", "longest"),
    [([0], [0], (4, 4)), ([0, 0], [0, 3], (0, 3)), ([0, 4], [0, 0], (4, 0))],
    ids=str,
)
def test_no_scores_of_packed_documents(
    executor: Executor, kernels: StrictKernels, cu_seq_q: list[int], cu_seq_k: list[int], longest: tuple[int, int]
) -> None:
    """All queries or all keys are behind the last document, whose lengths kernels would divide by."""
    q, k, v, weight = operands()
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends = (torch.tensor(cu_seq, dtype=torch.int32) for cu_seq in (cu_seq_q, cu_seq_k))
    of_documents = call(*packed, weight, documents=Documents(*ends, *longest))
    with_variants = replace(executor, variants=lambda *_: kernels.passes())
    out, lse = with_variants.forward(of_documents)
    assert_equal((out, lse), (torch.zeros(NQ, H, 24, dtype=DTYPE), torch.full((H, NQ), -torch.inf)))
    got = with_variants.backward(of_documents, out, lse, out, lse)
    assert_equal(got, tuple(torch.zeros_like(x) for x in (*packed, weight)))
    assert not any(kernels.calls.values())


@pytest.mark.parametrize("with_lengths", [True, False])
def test_decode_of_an_empty_cache(executor: Executor, kernels: StrictKernels, with_lengths: bool) -> None:
    _, k, v, weight = operands(nk=0)
    tail = random(B, H, SPEC.cq - 1 + NEW, SPEC.head_dim)
    lengths = torch.zeros(B, dtype=torch.int32) if with_lengths else None
    got = executor.decode(step(tail, k, v, weight, lengths=lengths))
    assert_equal(got, pipeline.decode(SPEC, step(tail, k, v, weight, lengths=lengths)))
    assert not any(kernels.calls.values())


def test_decode_without_a_sequence(executor: Executor, kernels: StrictKernels) -> None:
    _, k, v, weight = operands()
    tail: Any = random(B, H, SPEC.cq - 1 + NEW, SPEC.head_dim)[:0]
    got = executor.decode(step(tail, k[:0], v[:0], weight))
    assert_equal(got, pipeline.decode(SPEC, step(tail, k[:0], v[:0], weight)))
    assert not any(kernels.calls.values())
