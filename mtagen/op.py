"""``build``: from a kernel shape to a callable, differentiable op."""

from __future__ import annotations

import torch
from torch import Tensor

from .codegen import render
from .config import Config
from .dtypes import TORCH_DTYPES
from .errors import BackendError, SpecError, check_choice, explain
from .ops import library
from .ops.executor import Executor
from .ops.inputs import check_call, check_decode, resolve_scale
from .planner import BACKENDS, TARGETS, Plan, plan
from .planner.choice import GENERATED
from .planner.tables import shipped
from .runtime.devices import local_target
from .runtime.load import available_backends, compile_kernels, load, plan_key
from .runtime.tuned import remembered
from .spec import Spec

_INTERPRETER_TARGET = "generic"  # small tiles: the interpreter pays per operation


class MultiTokenAttention:
    """A built op. Made by :func:`build`; holds no parameters.

    Attributes:
        plan: what was decided and why; ``print(op.plan)`` shows it as a table.
    """

    def __init__(self, plan: Plan, key: str, dtypes: tuple[torch.dtype, ...]) -> None:
        self.plan = plan
        self._spec = plan.spec
        self._key = key
        self._dtypes = dtypes

    def __repr__(self) -> str:
        return f"<mtagen op {self.plan.name}, backend {self.plan.backend}>"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """softmax(conv(scale * q k^T)) v, differentiable once in q, k, v and weight (see :func:`mtagen.reference`).

        Args:
            q: ``(B, H, Nq, D)``; query i sits at position i + Nk - Nq. Any strides, the last one 1.
            k: ``(B, Hkv, Nk, D)``, H a multiple of Hkv.
            v: ``(B, Hkv, Nk, DV)``.
            weight: ``(H, cq, ck)`` or ``(H, 1, cq, ck)``, fp32 or q's dtype.
            scale: factor of q k^T, default ``D ** -0.5``.
            return_lse: also return log sum exp of each row's convolved scores, ``(B, H, Nq)`` fp32.

        Returns:
            ``(B, H, Nq, DV)`` in q's dtype. Rows that see no key are 0 with a log-sum-exp of -inf. Under
            ``torch.autocast`` q, k and v are cast to its dtype first.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
        """
        q, k, v = _autocast(q, k, v)
        check_call(self._spec, self._dtypes, q, k, v, weight)
        scale = resolve_scale(scale, self._spec.head_dim)
        out, lse = torch.ops.mtagen.forward.default(q, k, v, self._squeeze(weight), scale, self._key)
        return (out, lse) if return_lse else out

    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor,
        *,
        cache_seqlens: Tensor | None = None,
        scale: float | None = None,
        num_splits: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The last rows of the op, for generation: 1..8 new queries against a cache of keys and values.

        Args:
            q_tail: ``(B, H, cq - 1 + n_new, D)``: the cq - 1 queries before the new ones, then the new ones. Rows at
                positions before the sequence's start count as zero whatever they hold.
            k_cache: ``(B, Hkv, N, D)``, the new tokens' keys included.
            v_cache: ``(B, Hkv, N, DV)``.
            weight: as in the op.
            cache_seqlens: ``(B,)`` int32, keys in use per batch entry (0..N; larger counts as N), default N. Keys
                beyond are ignored whatever they hold.
            scale: as in the op.
            num_splits: parts the keys are split into (flash decoding); planned by default.
            return_lse: also return ``(B, H, n_new)`` log-sum-exps.

        Returns:
            ``(B, H, n_new, DV)`` in q_tail's dtype; not differentiable.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
        """
        q_tail, k_cache, v_cache = _autocast(q_tail, k_cache, v_cache)
        check_decode(self._spec, self._dtypes, q_tail, k_cache, v_cache, weight, cache_seqlens, num_splits)
        out, lse = torch.ops.mtagen.decode.default(
            q_tail,
            k_cache,
            v_cache,
            self._squeeze(weight),
            cache_seqlens,
            resolve_scale(scale, self._spec.head_dim),
            num_splits or 0,
            self._key,
        )
        return (out, lse) if return_lse else out

    def _squeeze(self, weight: Tensor) -> Tensor:
        return weight.squeeze(1) if weight.ndim == 4 else weight


def build(
    kernel: tuple[int, int],
    head_dim: int,
    *,
    value_head_dim: int | None = None,
    causal: bool = True,
    key_padding: str = "both",
    mask: str = "source",
    backend: str = "auto",
    target: str | None = None,
    dtype: torch.dtype | str | None = None,
    deterministic: bool | None = None,
    tune: bool = False,
) -> MultiTokenAttention:
    """Plan, render, compile and cache the op of one kernel shape and head dim. Everything is built here, not in calls.

    Kernels are compiled for, and loaded on, every visible GPU whose target is the plan's; on the current GPU alone if
    there is none, and in a process of an initialised ``torch.distributed`` job, which leaves other GPUs to other
    processes. On any other GPU the first call compiles and loads them, or raises a ``BackendError`` if that GPU cannot
    run the target's instructions.

    Args:
        kernel: ``(cq, ck)``, extent of the convolution over queries and over keys.
        head_dim: D, 16..256 in multiples of 8.
        value_head_dim: DV, default D.
        causal: query i sees keys j <= i + Nk - Nq.
        key_padding: ``both``, ``left`` or ``right``.
        mask: ``source`` or ``output``, see :class:`mtagen.Spec`.
        backend: ``auto`` (on the GPU generated kernels, of CUDA C++ or Triton pass by pass, whichever is expected to be
            faster, CUDA where they are close; on the CPU tiled PyTorch ops), ``cuda``, ``triton`` or ``torch``. A
            backend named here never falls back to another.
        target: what to plan for, e.g. ``sm_90a`` (see ``mtagen.TARGETS``), default this machine's GPU, else its CPU.
        dtype: of q, k, v; default bf16 on a GPU (fp32 in Triton's interpreter). The torch backend takes any of fp16,
            bf16, fp32 and fp64 unless one is named.
        deterministic: whether equal inputs give bit-equal gradients; default: where
            ``torch.use_deterministic_algorithms`` is on when the backward pass runs. Outputs always are, and every
            gradient but the dq of CUDA's fused backward kernel.
        tune: time the planner's candidates, of both backends, on this GPU first (minutes), unless that was done before.
            What it or ``mtagen tune`` finds for this spec is kept in the cache, and every build follows it.

    Raises:
        SpecError: the request is not legal, or an argument is of a wrong type.
        PlanError: it has no plan on this target; the message names the limit.
        BackendError: the backend cannot be used here; there is no GPU to tune on; what tuning chose is not accurate.
    """
    check_choice("backend", backend, BACKENDS, "is not built")
    if not (target is None or isinstance(target, str)):
        raise SpecError(explain("target", target, "must be a target's name, or None", ("cpu", *TARGETS)))
    if not isinstance(tune, bool):
        raise SpecError(explain("tune", tune, "must be a bool", (True, False)))
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise SpecError(explain("deterministic", deterministic, "must be a bool, or None", (True, False, None)))
    interpreted = Config.from_env().triton_interpret
    # A GPU that is named is never replaced.
    torch_on_cpu = backend == "torch" or (backend == "auto" and target in (None, "cpu"))
    if target is None:
        target = _INTERPRETER_TARGET if interpreted and backend == "triton" else local_target()
    named = None if dtype is None else _dtype_name(dtype)
    default = "fp32" if interpreted or target == "cpu" else "bf16"
    spec = Spec(
        kernel=kernel,
        head_dim=head_dim,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
        causal=causal,
        key_padding=key_padding,
        mask=mask,
        dtype=named or default,
    )
    if tune and backend == "torch":
        raise BackendError(explain("tune", tune, "there are no candidates of the torch backend", GENERATED))
    table = remembered(spec, target)
    if tune and table is None:
        from . import tuning  # which needs this module

        table = tuning.tune([spec], target).table
        tuning.keep([spec], target, table)
    planned = plan(
        spec,
        target,
        backend,
        available=("triton",) if interpreted else available_backends(),
        tables=None if table is None else (table, shipped(target)),
    )
    return assemble(planned, torch_on_cpu=torch_on_cpu, dtype=named, deterministic=deterministic)


def assemble(
    planned: Plan, *, torch_on_cpu: bool = True, dtype: str | None = None, deterministic: bool | None = None
) -> MultiTokenAttention:
    """The op of a plan: :func:`build`'s second half; ``torch_on_cpu`` is whether PyTorch serves tensors on the CPU.

    Raises:
        BackendError: the plan's backend cannot be used here.
    """
    spec, interpreted, generated = planned.spec, Config.from_env().triton_interpret, planned.backend != "torch"
    if interpreted and spec.dtype == "bf16" and planned.served_by("triton"):
        rule = "Triton's interpreter computes bf16 wrongly"
        raise BackendError(explain("dtype", "bf16", rule, "fp32 or fp16, or a GPU"))
    sources = render(planned)
    if generated and not interpreted:
        compile_kernels(planned, sources)
    kernels = load(planned, sources) if generated else None
    executor = Executor(
        spec,
        kernels,
        kernels_on_cpu=generated and interpreted,
        torch_on_cpu=torch_on_cpu,
        deterministic=deterministic,
    )
    key = f"{plan_key(planned, sources)}-torch_on_cpu{torch_on_cpu:d}-deterministic{deterministic}"
    library.register(key, executor)
    fixed = dtype or (spec.dtype if generated else None)
    return MultiTokenAttention(planned, key, (TORCH_DTYPES[fixed],) if fixed else tuple(TORCH_DTYPES.values()))


def _dtype_name(dtype: torch.dtype | str) -> str:
    names = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
    if isinstance(dtype, str) and dtype in TORCH_DTYPES:
        return dtype
    if isinstance(dtype, torch.dtype) and dtype in names:
        return names[dtype]
    raise SpecError(explain("dtype", dtype, "is not supported", [*TORCH_DTYPES, *names]))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What ``torch.autocast`` asks of an attention op: q, k and v in its dtype, the weight as it is."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # PyTorch refuses to say for meta tensors
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and _is_castable(x) else x for x in tensors)


def _is_castable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # as PyTorch's own ops: fp64 is meant
