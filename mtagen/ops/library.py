"""The registered ops ``mtagen::forward``, ``mtagen::backward``, ``mtagen::decode``, their autograd and flop formulas.

The arguments are the fields of :class:`mtagen.call.Call` and :class:`mtagen.call.Step`: tensors,
numbers and the key of a built op. The key is the content hash of the op's plan, so a traced graph
means the same in every process that has built the same op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..call import INPUTS, Call, Step, schema_of
from ..errors import BackendError, InputError, explain
from . import flops
from .bypass import is_passed_on
from .checks import check_constants
from .executor import Executor, gradients_like

_executors: dict[str, Executor] = {}

_library = torch.library.Library("mtagen", "DEF")
_AUTOCAST_KEYS = [
    name for name in torch._C.DispatchKey.__members__ if name.startswith("Autocast")
]  # one per device type


def register(key: str, executor: Executor) -> None:
    """Make ``key`` callable through the registered ops."""
    _executors[key] = executor


def executor_of(key: str) -> Executor:
    """Return the executor of the op with this key.

    Raises:
        BackendError: this process has not built the op.
    """
    try:
        return _executors[key]
    except KeyError:
        rule = "no op of this key was built in this process"
        raise BackendError(explain("key", key, rule, "call mtagen.build(...) with the same arguments first")) from None


def _forward(*arguments: Any) -> list[Tensor]:
    call = Call(*arguments)
    return [*executor_of(call.key).forward(call)]


def _backward(grad_out: Tensor, grad_lse: Tensor, *rest: Any) -> list[Tensor]:
    call, (out, lse) = _call_of(rest)
    return executor_of(call.key).backward(call, grad_out, grad_lse, out, lse)


def _call_of(rest: Sequence[Any]) -> tuple[Call, Sequence[Tensor]]:
    """Return the call and its results from the arguments of ``mtagen::backward`` after the gradients."""
    return Call(*rest[:INPUTS], *rest[INPUTS + 2 :]), rest[INPUTS : INPUTS + 2]


def _decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    step = Step(*arguments)
    return executor_of(step.key).decode(step)


def _stats_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def fake_forward(*arguments: Any) -> list[Tensor]:
    """Return empty results of a call, for tracing: outputs, log-sum-exps, and unmixed outputs if kernels keep them."""
    call = Call(*arguments)
    q = call.q
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])  # with packed documents, heads come first
    return [_outputs_of(call), q.new_empty(rows, dtype=_stats_dtype(q)), *executor_of(call.key).kept(call)]


def _outputs_of(call: Call) -> Tensor:
    return call.q.new_empty(*call.q.shape[:-1], call.v.shape[-1])


def fake_backward(grad_out: Tensor, grad_lse: Tensor, *rest: Any) -> list[Tensor]:
    """Return empty gradients of the tensors that are given, for tracing."""
    call, _ = _call_of(rest)
    given = [x for x in rest[:INPUTS] if x is not None]
    return gradients_like(given, executor_of(call.key).spec.have_gradients)


def _fake_decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    step = Step(*arguments)
    q_tail, new_tokens = step.q_tail, step.q_tail.shape[2] - executor_of(step.key).spec.context
    out = q_tail.new_empty(*q_tail.shape[:2], new_tokens, step.v_cache.shape[3])
    return out, q_tail.new_empty(out.shape[:3], dtype=_stats_dtype(q_tail))


def _without_autocast(op: OpOverload, *arguments: Any) -> Any:
    """Call an op with autocast off: it has cast the op's inputs, and must not cast inside the op."""
    with torch._C._DisableAutocast():
        return op(*arguments)


def _below_autograd(op: OpOverload, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


class Recorded(torch.autograd.Function):
    """An op as a node of autograd's graph; subclasses define its backward pass.

    Attributes:
        returns: the container of results that the op's schema returns.
    """

    returns: type[tuple[Any, ...]] | type[list[Any]] = tuple

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], arguments: Sequence[Any], *given: Tensor) -> tuple[Tensor, ...]:
        """Run the op.

        Args:
            ctx: what autograd keeps for the backward pass.
            run: computes the op.
            arguments: its arguments.
            given: the tensors among them, which autograd looks for here. It takes longer for arguments that are None.
        """
        return tuple(run(*arguments))


class _Differentiable(Recorded):
    """The op's forward pass, which saves the tensors that its backward pass needs."""

    returns = list

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], arguments: Sequence[Any], *given: Tensor) -> tuple[Tensor, ...]:
        call = Call(*arguments)
        check_constants(executor_of(call.key).spec, arguments[:INPUTS])
        out, lse, *kept = results = tuple(run(*arguments))
        tensors, ctx.others = call.split()
        ctx.given = len(given)
        ctx.save_for_backward(kept[0] if kept else out, lse, *tensors)
        if kept:
            ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # kernels need no zeros for results that nothing depends on
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        out, lse = saved[:2]
        call = Call.joined(saved[2:], ctx.others)
        if grad_out is None:
            grad_out = _outputs_of(call).zero_()
        # run() would ask the same of more arguments, and make a call of them again.
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or forward_ad._current_level >= 0
            or not is_passed_on((grad_out, grad_lse, *saved))
        ):
            grads = backward(call, grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse, out, lse)
        else:
            grads = executor_of(call.key).backward(call, grad_out, grad_lse, out, lse)
        return None, None, *grads, *(None,) * (ctx.given - len(grads))


class DifferentiatedOnce(Recorded):
    """An op's backward pass, which refuses to be differentiated."""

    returns = list

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        got, rule = "a gradient of a gradient", "mtagen ops are differentiable once"
        raise BackendError(explain("double backward", got, rule, "mtagen.reference, by autograd"))


class _Generation(Recorded):
    """Decode, which refuses to be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise BackendError(
            explain("decode", "a backward pass", "decode has no gradients", "the op itself, on whole sequences")
        )


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _autograd(run: Callable[..., Any], function: type[Recorded], *arguments: Any) -> Any:
    """Run an op and record it for autograd if an argument requires gradients.

    It replaces ``torch.library.register_autograd``, which takes 20 us more on the CPU where
    gradients are needed.

    Raises:
        BackendError: an argument has a tangent, which an op without a forward-mode formula would
            silently drop; or a transform of ``torch.func`` asks for gradients.
    """
    if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in arguments if isinstance(x, Tensor)):
        got, rule = "a tangent", "mtagen ops have no forward-mode derivatives"
        raise BackendError(explain("forward-mode differentiation", got, rule, "mtagen.reference"))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        if torch._C._are_functorch_transforms_active():
            got, rule = "torch.func", "torch.func cannot differentiate mtagen ops"
            raise BackendError(explain("transform", got, rule, "torch.autograd.grad, or mtagen.reference"))
        # function.apply would also look for wrappers that transforms have left behind. None come here, because the
        # dispatcher takes them off.
        given = [x for x in arguments if x is not None and isinstance(x, Tensor)]
        return function.returns(super(torch.autograd.Function, function).apply(run, arguments, *given))  # type: ignore[misc]
    return run(*arguments)


def _sample_by_sample(
    call: Callable[..., Any],
    returns: Callable[[Iterable[Tensor]], Any],
    samples: int,
    dims: Iterable[int | None],
    arguments: Sequence[Any],
) -> Any:
    """Call the op once per sample of vmap, and stack the results along a new first axis.

    Samples cannot be batch entries of one call, because each sample has its own gradients of
    weights and its own dropout mask.

    Args:
        call: the op.
        returns: makes the container of results that the op's schema returns.
        samples: number of samples.
        dims: the axis of samples of each argument; None if all samples share the argument.
        arguments: the op's arguments.

    Raises:
        InputError: there are no samples, so the shapes of the results are unknown.
    """
    if samples == 0:
        raise InputError(explain("samples of vmap", 0, "must be at least 1", "1, 2, ..."))
    along = [*zip(arguments, dims, strict=True)]
    results = [call(*(x if dim is None else x.select(dim, i) for x, dim in along)) for i in range(samples)]
    return returns(torch.stack(each) for each in zip(*results, strict=True))


def _vmapped(op: OpOverload, returns: Callable[..., Any], info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
    """Apply the batching rule of ``torch.func.vmap``: return results and the axis of samples of
    each.
    """
    results = _sample_by_sample(op, returns, info.batch_size, dims, arguments)
    return results, returns(0 for _ in results)


def _vmapped_by_autograd(op: OpOverload, returns: Callable[..., Any], *arguments: Any) -> Any:
    """Apply the batching rule of ``torch.autograd.grad(..., is_grads_batched=True)``.

    PyTorch uses legacy batched tensors there instead of ``torch.func``. They have one level,
    because such calls are never nested.
    """
    level = 1
    dims = [0 if isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) else None for x in arguments]
    exposed = [
        x if dim is None else torch._remove_batch_dim(x, level, batch_size=0, out_dim=0)
        for x, dim in zip(arguments, dims, strict=True)
    ]
    samples = next(len(x) for x, dim in zip(exposed, dims, strict=True) if dim is not None)
    results = _sample_by_sample(op, returns, samples, dims, exposed)
    return returns(torch._add_batch_dim(x, 0, level) for x in results)


class _Op(NamedTuple):
    """A registered op, and the function that computes and records it."""

    registered: OpOverload
    kernel: Callable[..., Any]


_OPS: dict[str, _Op] = {}


def run(name: str, *arguments: Any) -> Any:
    """Call a registered op.

    Where PyTorch's dispatcher would only pass the arguments on (:mod:`.bypass`), the kernel is
    called directly. That saves a quarter of a call's time on the CPU, and more where gradients are
    needed.
    """
    op = _OPS[name]
    if torch.compiler.is_compiling() or not is_passed_on(arguments):
        return op.registered(*arguments)
    return op.kernel(*arguments)


def backward(call: Call, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    """Call ``mtagen::backward``, which returns the gradients of the tensors that are given."""
    grads: list[Tensor] = run("backward", grad_out, grad_lse, *call[:INPUTS], out, lse, *call[INPUTS:])
    return grads


def define_op(
    name: str, arguments: Sequence[str], returns: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> OpOverload:
    """Define an op without gradients in the namespace ``mtagen``, which :func:`run` calls by its name.

    Args:
        name: the op's name.
        arguments: the op's arguments, as its schema declares them.
        returns: the type of its results, as its schema declares it.
        kernel: computes the op.
        fake: returns empty results, for tracing.

    Returns:
        The op.
    """
    _library.define(f"{name}({', '.join(arguments)}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mtagen::{name}", fake, lib=_library)
    op: OpOverload = getattr(torch.ops.mtagen, name).default
    _OPS[name] = _Op(op, kernel)
    return op


def register_op(
    name: str,
    arguments: Sequence[str],
    returns: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    function: type[Recorded],
    flop: Callable[..., int],
) -> None:
    """Define an op with gradients.

    Args:
        name, arguments, returns, kernel, fake: as in :func:`define_op`.
        function: differentiates the op.
        flop: counts the op's flop.
    """
    op = define_op(name, arguments, returns, kernel, fake)
    packet = op.overloadpacket
    register_flop_formula(packet, get_raw=True)(lambda *arguments, **_: flop(*arguments))
    _library.impl(name, partial(_autograd, partial(_below_autograd, op), function), "Autograd")
    for autocast_key in _AUTOCAST_KEYS:
        _library.impl(name, partial(_without_autocast, op), autocast_key)
    torch.library.register_vmap(f"mtagen::{name}", partial(_vmapped, op, function.returns), lib=_library)
    _library.impl(name, partial(_vmapped_by_autograd, op, function.returns), "Batched")
    _OPS[name] = _Op(op, partial(_autograd, kernel, function))


_CALL = schema_of(Call)
register_op(
    "forward",
    _CALL,
    "Tensor[]",
    _forward,
    fake_forward,
    _Differentiable,
    lambda *arguments: flops.forward_flop(Call(*arguments)),
)
register_op(
    "backward",
    ["Tensor grad_out", "Tensor grad_lse", *_CALL[:INPUTS], "Tensor out", "Tensor lse", *_CALL[INPUTS:]],
    "Tensor[]",
    _backward,
    fake_backward,
    DifferentiatedOnce,
    lambda grad_out, grad_lse, *rest: flops.backward_flop(_call_of(rest)[0]),
)
register_op(
    "decode",
    schema_of(Step),
    "(Tensor, Tensor)",
    _decode,
    _fake_decode,
    _Generation,
    lambda *arguments: flops.decode_flop(Step(*arguments)),
)
