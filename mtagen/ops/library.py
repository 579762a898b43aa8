"""The registered ops ``mtagen::forward``, ``mtagen::backward``, ``mtagen::decode``, their autograd and flop formulas.

Schemas hold tensors, numbers and the key of a built op; the key is the content hash of its plan, so graphs that mention
it mean the same in every process that has built the same op.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..errors import BackendError, explain
from . import flops
from .executor import Executor

_executors: dict[str, Executor] = {}

_library = torch.library.Library("mtagen", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor[] weights, float scale, str key) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "backward(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor[] weights, Tensor out, "
    "Tensor lse, float scale, str key) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "decode(Tensor q_tail, Tensor k_cache, Tensor v_cache, Tensor[] weights, Tensor? cache_seqlens, float scale, "
    "int num_splits, str key) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def register(key: str, executor: Executor) -> None:
    """Make ``key`` callable through the registered ops."""
    _executors[key] = executor


def _executor(key: str) -> Executor:
    try:
        return _executors[key]
    except KeyError:
        rule = "no op of this key was built in this process"
        raise BackendError(explain("key", key, rule, "call mtagen.build(...) with the same arguments first")) from None


def _as_written(x: Tensor) -> AbstractContextManager[object]:
    """Autocast stops at the ops: it has cast their inputs, and must not cast what they compute inside."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor], scale: float, key: str
) -> tuple[Tensor, Tensor]:
    with _as_written(q):
        return _executor(key).forward(q, k, v, weights, scale)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    key: str,
) -> list[Tensor]:
    with _as_written(q):
        return _executor(key).backward(grad_out, grad_lse, q, k, v, weights, out, lse, scale)


def _decode(
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor],
    cache_seqlens: Tensor | None,
    scale: float,
    num_splits: int,
    key: str,
) -> tuple[Tensor, Tensor]:
    with _as_written(q_tail):
        return _executor(key).decode(q_tail, k_cache, v_cache, weights, cache_seqlens, scale, num_splits)


def _stats_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor], scale: float, key: str
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(q.shape[:3], dtype=_stats_dtype(q))


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    key: str,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, *weights)]


def _fake_decode(
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor],
    cache_seqlens: Tensor | None,
    scale: float,
    num_splits: int,
    key: str,
) -> tuple[Tensor, Tensor]:
    new_tokens = q_tail.shape[2] - _executor(key).spec.context
    out = q_tail.new_empty(*q_tail.shape[:2], new_tokens, v_cache.shape[3])
    return out, q_tail.new_empty(out.shape[:3], dtype=_stats_dtype(q_tail))


def _below_autograd(op: OpOverload, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


class _Recorded(torch.autograd.Function):
    """An op that autograd knows of; what gradients of it mean is up to the classes below.

    Autograd looks for tensors among the arguments, not in lists of them: the weights are arguments of their own here,
    ``count`` of them from ``place`` on, which is the place of the op's list of them.
    """

    @staticmethod
    def forward(ctx: Any, op: OpOverload, place: int, count: int, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(op, *_with_list(arguments, place, count)))


class _Differentiable(_Recorded):
    """The op's forward pass, with what its backward pass needs kept."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, place: int, count: int, *arguments: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = _below_autograd(op, *_with_list(arguments, place, count))
        *tensors, ctx.scale, ctx.key = arguments
        ctx.count = count
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        saved = _with_list(ctx.saved_tensors, 3, ctx.count)
        grads = torch.ops.mtagen.backward.default(grad_out, grad_lse, *saved, ctx.scale, ctx.key)
        return None, None, None, *grads, None, None


class _DifferentiatedOnce(_Recorded):
    """The op's backward pass, which refuses to be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        got, rule = "a gradient of a gradient", "mtagen ops are differentiable once"
        raise BackendError(explain("double backward", got, rule, "mtagen.reference, by autograd"))


class _Generation(_Recorded):
    """Decode, which refuses to be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise BackendError(explain("decode", "a backward pass", "decode is for generation only", "the op itself"))


def _with_list(arguments: Sequence[Any], place: int, count: int) -> tuple[Any, ...]:
    """The arguments of an op, with ``count`` of them from ``place`` on as one list."""
    end = place + count
    return (*arguments[:place], list(arguments[place:end]), *arguments[end:])


def _flat(arguments: Sequence[Any], place: int) -> tuple[Any, ...]:
    """What :func:`_with_list` makes a list of, as arguments again."""
    return (*arguments[:place], *arguments[place], *arguments[place + 1 :])


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _autograd(op: OpOverload, function: type[torch.autograd.Function], place: int, *arguments: Any) -> Any:
    """What ``torch.library.register_autograd`` would make, with 20 us less on the CPU where gradients are asked for.

    Args:
        op: the op.
        function: what autograd is to do with it.
        place: that of the op's list of weights among its arguments.
        arguments: of the op.

    Raises:
        BackendError: an argument has a tangent, which an op without a forward-mode formula would silently drop;
            gradients are asked for by a transform of ``torch.func``.
    """
    if forward_ad._current_level >= 0 and any(
        _has_tangent(x) for x in _flat(arguments, place) if isinstance(x, Tensor)
    ):
        got, rule = "a tangent", "mtagen ops have a backward pass only"
        raise BackendError(explain("forward-mode differentiation", got, rule, "mtagen.reference"))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        if torch._C._are_functorch_transforms_active():
            got, rule = "torch.func", "gradients of mtagen ops are those of torch.autograd"
            raise BackendError(explain("transform", got, rule, "torch.autograd.grad, or mtagen.reference"))
        results = function.apply(  # type: ignore[no-untyped-call]
            op, place, len(arguments[place]), *_flat(arguments, place)
        )
        return list(results) if function is _DifferentiatedOnce else results
    return _below_autograd(op, *arguments)


for _name, _kernel, _fake, _function, _weights_at, _flop in (
    ("forward", _forward, _fake_forward, _Differentiable, 3, flops.attention_forward_flop),
    ("backward", _backward, _fake_backward, _DifferentiatedOnce, 5, flops.attention_backward_flop),
    ("decode", _decode, _fake_decode, _Generation, 3, flops.attention_decode_flop),
):
    _packet = getattr(torch.ops.mtagen, _name)
    _op = _packet.default
    register_flop_formula(_packet)(_flop)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    _library.impl(_name, partial(_autograd, _op, _function, _weights_at), "Autograd")
    torch.library.register_fake(f"mtagen::{_name}", _fake, lib=_library)
