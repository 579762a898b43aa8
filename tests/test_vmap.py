"""Samples of ``torch.func.vmap`` and of ``is_grads_batched``: each gets the bits that a call of its own gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mtagen
from mtagen import BackendError, InputError
from mtagen.distributed import ContextParallel

pytestmark = pytest.mark.usefixtures("one_thread", "warnings_are_errors")

SAMPLES, HEADS, D = 3, 4, 16
SHAPES = {"q": (2, HEADS, 7, D), "k": (2, 2, 9, D), "v": (2, 2, 9, D), "weight": (HEADS, 3, 4)}
SHAPES |= {"head_weight": (2, 2, 2), "post_weight": (HEADS, 2, 3), "post_head_weight": (1, HEADS, HEADS)}
PLAIN = ("q", "k", "v")
STAGES: dict[str, Any] = {"mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": HEADS}


@pytest.fixture
def warnings_are_errors() -> Iterator[None]:
    """PyTorch warns where it makes up a batching rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(kernel: tuple[int, int] | None = (3, 4), **options: Any) -> mtagen.AttentionOp:
    return mtagen.build(kernel, D, target="cpu", **options)


def tensors(*names: str, samples: bool = False) -> dict[str, Tensor]:
    """Arguments of an op by name, or as many samples of each."""
    generator = torch.Generator().manual_seed(len(names))
    shapes = {name: (SAMPLES,) * samples + SHAPES[name] for name in names}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def attention(**options: Any) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    op = build(**options)
    return op, tensors(*PLAIN, *op.plan.spec.weight_names)


def documents() -> tuple[Callable[..., Any], dict[str, Tensor]]:
    op, given = attention(**STAGES)
    packed = {name: given[name].detach()[0].transpose(0, 1).requires_grad_() for name in PLAIN}
    places = {
        "cu_seq_q": torch.tensor([0, 3, 7], dtype=torch.int32),
        "cu_seq_k": torch.tensor([0, 5, 9], dtype=torch.int32),
    }
    return lambda **x: op.varlen(**x, **places, max_q=4, max_k=5), given | packed


def dropout() -> tuple[Callable[..., Any], dict[str, Tensor]]:
    op, given = attention(**STAGES, dropout=True)
    seed = torch.tensor([3, 4])
    return lambda **x: op(**x, dropout_p=0.5, dropout_seed=seed), given


CALLS: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Tensor]]]] = {
    "plain": lambda: attention(kernel=None),
    "convolution": attention,
    "all stages": lambda: attention(**STAGES),
    "dropout": dropout,
    "documents": documents,
}


@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["out", "lse", "out and lse"])
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_several_gradients_at_once(make: Callable[[], Any], of: tuple[int, ...]) -> None:
    call, given = make()
    results = call(**given, return_lse=True)
    outputs, leaves = [results[i] for i in of], [*given.values()]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(SAMPLES, *x.shape, generator=generator) for x in outputs]

    def gradients(grad_outputs: list[Tensor], batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            outputs, leaves, grad_outputs, retain_graph=True, is_grads_batched=batched, materialize_grads=True
        )

    together = gradients(grads, True)
    one_by_one = zip(*(gradients([x[i] for x in grads], False) for i in range(SAMPLES)), strict=True)
    for found, expected in zip(together, one_by_one, strict=True):
        assert torch.equal(found, torch.stack(expected))


def test_jacobian_is_that_of_the_specification() -> None:
    op = build(**STAGES, dtype="fp64")
    given = {name: x.detach().double() for name, x in tensors(*SHAPES).items()}

    def jacobians(function: Callable[..., Any]) -> Any:
        def rows(q: Tensor, weight: Tensor) -> Tensor:
            return function(**given | {"q": q, "weight": weight}).sum((0, 1, 3))

        return torch.autograd.functional.jacobian(rows, (given["q"], given["weight"]), vectorize=True)

    torch.testing.assert_close(jacobians(op), jacobians(mtagen.reference))


def test_second_derivatives_are_refused() -> None:
    op, given = attention()

    def loss(q: Tensor) -> Tensor:
        return op(**given | {"q": q}).square().sum()

    with pytest.raises(BackendError, match=r"double backward: got .*differentiable once"):
        torch.autograd.functional.hessian(loss, given["q"], vectorize=True)


@pytest.mark.parametrize("sampled", [("q",), ("k", "v"), ("post_weight",), tuple(SHAPES)], ids=str)
def test_samples_of_arguments(sampled: tuple[str, ...]) -> None:
    """Results and gradients; what all samples share gets the sum of theirs."""
    op, given = attention(**STAGES)
    given |= tensors(*sampled, samples=True)
    names, leaves = [*given], [*given.values()]

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = op(**dict(zip(names, x, strict=True)), return_lse=True)
        return out, lse

    dims = tuple(0 if name in sampled else None for name in names)
    found = torch.func.vmap(call, dims)(*leaves)
    each = [call(*(x if dim is None else x[i] for x, dim in zip(leaves, dims, strict=True))) for i in range(SAMPLES)]
    expected = [torch.stack(x) for x in zip(*each, strict=True)]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    losses = [sum(x.square().sum() for x in results) for results in (found, expected)]
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 2, -2])
def test_axis_of_samples(dim: int) -> None:
    op, given = attention()
    q = tensors("q", samples=True)["q"]
    found = torch.func.vmap(lambda q: op(**given | {"q": q}), in_dims=dim, out_dims=dim)(q.movedim(0, dim))
    assert torch.equal(found.movedim(dim, 0), torch.stack([op(**given | {"q": x}) for x in q]))


def test_samples_of_samples() -> None:
    op, given = attention()
    q, k = (tensors(name, samples=True)[name] for name in ("q", "k"))
    found = torch.func.vmap(lambda q: torch.func.vmap(lambda k: op(**given | {"q": q, "k": k}))(k))(q)
    for i, j in ((0, 1), (2, 0)):
        assert torch.equal(found[i, j], op(**given | {"q": q[i], "k": k[j]}))


def test_samples_of_decode() -> None:
    op, given = attention()
    lengths = torch.tensor([[9, 4], [1, 8], [7, 7]], dtype=torch.int32)
    found = torch.func.vmap(lambda n: op.decode(*given.values(), cache_seqlens=n))(lengths)
    assert torch.equal(found, torch.stack([op.decode(*given.values(), cache_seqlens=n) for n in lengths]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_what_samples_drop(randomness: str) -> None:
    op, given = attention(dropout=True)
    q = given["q"].expand(SAMPLES, *SHAPES["q"])
    torch.manual_seed(0)
    found = torch.func.vmap(lambda q: op(**given | {"q": q}, dropout_p=0.5), randomness=randomness)(q)
    assert torch.equal(found[0], found[1]) == (randomness == "same")


def test_compiled() -> None:
    torch._dynamo.reset()
    op, given = attention()
    q = tensors("q", samples=True)["q"]

    def call(q: Tensor) -> Tensor:
        return torch.func.vmap(lambda q: op(**given | {"q": q}))(q)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q))


@pytest.mark.usefixtures("one_process")
def test_several_gradients_of_a_sequence_that_ranks_share() -> None:
    op, given = attention(**STAGES)
    q, k, v = (given[name].detach()[..., :7, :].requires_grad_() for name in PLAIN)
    out = ContextParallel(op, torch.distributed.group.WORLD)(**given | {"q": q, "k": k, "v": v}, length=7)
    grads = torch.randn(SAMPLES, *out.shape)
    together = torch.autograd.grad(out, (q, k, v), grads, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(out, (q, k, v), x, retain_graph=True) for x in grads]
    for found, expected in zip(together, zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(found, torch.stack(expected))


def test_no_samples() -> None:
    op, given = attention()
    with pytest.raises(InputError, match=r"samples of vmap: got 0; must be at least 1; legal: 1, 2, \.\.\."):
        torch.func.vmap(lambda q: op(**given | {"q": q}))(torch.zeros(0, *SHAPES["q"]))
