"""What kernels for packed documents and dropout are passed, from the op down, in both passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from calls import call_of
from test_executor import assert_dense_fp32, assert_rows
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from mtagen import Spec, cpu, plan
from mtagen.call import Documents
from mtagen.dropout import Dropout
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp
from mtagen.ops.executor import Executor
from mtagen.runtime.load import Passes

HEADS, KV_HEADS = 4, 2
LENGTHS = ((9, 5), (0, 4), (3, 8), (2, 0))  # queries and keys of documents
MAX_Q, MAX_K = 21, 34  # both more than they need be, so that they are told from each other and from what is needed
SEED, P = (7, 2**40 + 3), 0.25


class Told(NamedTuple):
    """What a pass was told besides tensors."""

    documents: tuple[Any, ...] | None
    dropout: tuple[Any, ...] | None


class Variants:
    """Kernels for packed documents and dropout, played by PyTorch; they refuse what the real ones would read wrongly.

    Attributes:
        built: for what kernels were asked for, (packed, dropout).
        told: of each call.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.built: list[tuple[bool, bool]] = []
        self.told: list[Told] = []

    def __call__(self, packed: bool, dropout: bool, page_size: int | None) -> Passes:
        assert page_size is None
        self.built.append((packed, dropout))
        return Passes(partial(self.forward, packed, dropout), partial(self.backward, packed, dropout))

    def forward(
        self,
        packed: bool,
        drops: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        scale: float,
        *more: Any,
    ) -> tuple[Tensor, Tensor]:
        assert_rows(q, k, v)
        told = self._note(packed, drops, more)
        return cpu.forward(self.spec, call_of(self.spec, q, k, v, self._weights(weight), scale, *told))

    def backward(
        self,
        packed: bool,
        drops: bool,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        out: Tensor,
        lse: Tensor,
        scale: float,
        *more: Any,
        deterministic: bool,
    ) -> tuple[Tensor | None, ...]:
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        assert_rows(grad_out, q, k, v)
        assert_dense_fp32(grad_lse, lse)
        call = call_of(self.spec, q, k, v, self._weights(weight), scale, *self._note(packed, drops, more))
        grads = cpu.backward(self.spec, call, grad_out, grad_lse, out, lse)
        return grads if self.spec.kernel else (*grads, None)

    def _weights(self, weight: Tensor | None) -> list[Tensor]:
        assert (weight is None) == (self.spec.kernel is None)
        if weight is None:
            return []
        assert_dense_fp32(weight)
        assert weight.shape == (HEADS, self.spec.cq, self.spec.ck)
        return [weight]

    def _note(self, packed: bool, drops: bool, more: tuple[Any, ...]) -> tuple[Documents | None, Dropout | None]:
        assert len(more) == 4 * packed + 2 * drops
        for x in more:
            assert not isinstance(x, Tensor) or x.is_contiguous()
        documents = Documents(*more[:4]) if packed else None
        dropout = Dropout(*more[-2:]) if drops else None
        both = (None if given is None else tuple(map(plain, given)) for given in (documents, dropout))
        self.told.append(Told(*both))
        return documents, dropout


def plain(x: Any) -> Any:
    return tuple(x.tolist()) if isinstance(x, Tensor) else x


def with_kernels(spec: Spec) -> Iterator[tuple[AttentionOp, Variants]]:
    """An op whose kernels are those above."""
    variants, key = Variants(spec), "kernels of tests"
    library.register(key, Executor(spec, Passes(refuse, refuse), True, False, variants=variants))
    yield AttentionOp(plan(spec, "cpu"), key, (torch.float32,), drops=True), variants
    del library._executors[key]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("these kernels are for batches without dropout")


@pytest.fixture
def kernels() -> Iterator[tuple[AttentionOp, Variants]]:
    yield from with_kernels(Spec((2, 3), 16, 24, dtype="fp32"))


@pytest.fixture
def plain_kernels() -> Iterator[tuple[AttentionOp, Variants]]:
    yield from with_kernels(Spec(None, 16, 24, dtype="fp32"))


def starts(axis: int) -> Tensor:
    return torch.tensor([0, *(lengths[axis] for lengths in LENGTHS)]).cumsum(0).to(torch.int32)


def seed() -> Tensor:
    return torch.tensor(SEED)


def column(x: Tensor) -> Tensor:
    """The same numbers, as a column of a table."""
    return torch.stack([x, torch.full_like(x, 99)], 1)[:, 0]


def operands(op: AttentionOp, nq: int = 14, nk: int = 17) -> list[Tensor]:
    shapes = [(nq, HEADS, 16), (nk, KV_HEADS, 16), (nk, KV_HEADS, 24), *op.plan.spec.weights(HEADS).values()]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def train(op: Callable[..., Any], leaves: list[Tensor], **options: Any) -> list[Tensor]:
    """Out, lse and all gradients."""
    out, lse = op(*leaves, **options, return_lse=True)
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "directly": nullcontext,
    "by the dispatcher": lambda: FlopCounterMode(display=False),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"dense": torch.clone, "columns": column}


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_both_passes_are_told_where_documents_are(
    kernels: tuple[AttentionOp, Variants], way: Any, layout: Callable[[Tensor], Tensor], drops: bool
) -> None:
    op, variants = kernels
    documents = Documents(layout(starts(0)), layout(starts(1)), MAX_Q, MAX_K)
    dropout = {"dropout_p": P, "dropout_seed": layout(seed())} if drops else {}
    leaves = operands(op)
    with way():
        got = train(op.varlen, leaves, **documents._asdict(), **dropout)
    assert variants.built == [(True, drops)] * 2
    told = Told((plain(starts(0)), plain(starts(1)), MAX_Q, MAX_K), (SEED, P) if drops else None)
    assert variants.told == [told] * 2
    own = cpu_op(op.plan.spec)
    expected = train(own.varlen, leaves, **documents._asdict(), **dropout)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_both_passes_are_told_what_is_dropped(
    kernels: tuple[AttentionOp, Variants], layout: Callable[[Tensor], Tensor]
) -> None:
    """Of batches, too."""
    op, variants = kernels
    q, k, v, weight = operands(op)
    batch = [*(x.detach().transpose(0, 1).contiguous()[None].requires_grad_() for x in (q, k, v)), weight]
    got = train(op, batch, dropout_p=P, dropout_seed=layout(seed()))
    assert variants.built == [(False, True)] * 2
    assert variants.told == [Told(None, (SEED, P))] * 2
    expected = train(cpu_op(op.plan.spec), batch, dropout_p=P, dropout_seed=seed())
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("drops", [False, True])
def test_tracing_builds_no_kernels(kernels: tuple[AttentionOp, Variants], drops: bool) -> None:
    """Kernels that are built in a first call are built by the call itself."""
    op, variants = kernels
    leaves, dropout = operands(op), {"dropout_p": P, "dropout_seed": seed()} if drops else {}
    documents = Documents(starts(0), starts(1), MAX_Q, MAX_K)

    def traced(graph: torch.fx.GraphModule, given: Any) -> torch.fx.GraphModule:
        assert not variants.built
        return graph

    compiled = torch.compile(op.varlen, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=traced))
    got = train(compiled, leaves, **documents._asdict(), **dropout)
    assert variants.built == [(True, drops)] * 2
    assert all(map(torch.equal, got, train(cpu_op(op.plan.spec).varlen, leaves, **documents._asdict(), **dropout)))


def test_plain_attention_of_documents_has_no_weight(plain_kernels: tuple[AttentionOp, Variants]) -> None:
    op, variants = plain_kernels
    leaves, documents = operands(op), Documents(starts(0), starts(1), MAX_Q, MAX_K)
    got = train(op.varlen, leaves, **documents._asdict())
    assert len(variants.told) == 2
    assert all(map(torch.equal, got, train(cpu_op(op.plan.spec).varlen, leaves, **documents._asdict())))


@pytest.mark.parametrize(("nq", "nk"), [(0, 17), (14, 0), (0, 0)])
def test_documents_without_scores(kernels: tuple[AttentionOp, Variants], nq: int, nk: int) -> None:
    """Nothing is launched, and results have the shapes that they have otherwise: of the log-sum-exps, heads first."""
    op, variants = kernels
    leaves = operands(op, nq, nk)
    cu_seq_q, cu_seq_k = (torch.tensor([0, 0, n], dtype=torch.int32) for n in (nq, nk))
    out, lse, *grads = train(op.varlen, leaves, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=MAX_Q, max_k=MAX_K)
    assert variants.told == []
    assert torch.equal(out, torch.zeros(nq, HEADS, 24))
    assert torch.equal(lse, torch.full((HEADS, nq), -torch.inf))
    assert all(torch.equal(grad, torch.zeros_like(x)) for grad, x in zip(grads, leaves, strict=True))


def test_shapes_of_documents_are_known_beforehand(kernels: tuple[AttentionOp, Variants]) -> None:
    """Without a launch, on tensors without values."""
    op, variants = kernels
    with torch.device("meta"):
        leaves = [torch.empty_like(x, device="meta").requires_grad_() for x in operands(op)]
        documents = Documents(starts(0).to("meta"), starts(1).to("meta"), MAX_Q, MAX_K)
        out, lse, *grads = train(op.varlen, leaves, **documents._asdict())
    assert variants.told == []
    assert (out.shape, lse.shape) == ((14, HEADS, 24), (HEADS, 14))
    assert [grad.shape for grad in grads] == [x.shape for x in leaves]


def cpu_op(spec: Spec) -> AttentionOp:
    """The op of the same spec by PyTorch."""
    key = "the same on the CPU"
    library.register(key, Executor(spec, None, False, True))
    return AttentionOp(plan(spec, "cpu"), key, (torch.float32,), drops=True)
