"""``build``: from a kernel shape to a callable, differentiable op."""

from __future__ import annotations

from functools import partial

from .config import Config
from .dtypes import DTypeLike, dtype_name
from .errors import BackendError, SpecError, check_choice, explain
from .ops.attention import AttentionOp, assemble
from .planner import BACKENDS, TARGETS, Backend, plan
from .planner.choice import GENERATED
from .planner.tables import shipped
from .runtime.devices import local_target
from .runtime.load import available_backends
from .runtime.tuned import remembered
from .spec import DType, KeyPadding, Mask, Spec

_INTERPRETER_TARGET = "generic"  # small tiles: the interpreter pays per operation


def build(
    kernel: tuple[int, int] | None,
    head_dim: int,
    *,
    mixed_heads: int | None = None,
    post_kernel: tuple[int, int] | None = None,
    post_mixed_heads: int | None = None,
    window: tuple[int, int] = (-1, -1),
    value_head_dim: int | None = None,
    causal: bool = True,
    key_padding: KeyPadding = "both",
    mask: Mask = "source",
    backend: Backend = "auto",
    target: str | None = None,
    dtype: DTypeLike | None = None,
    deterministic: bool | None = None,
    packed: bool = False,
    dropout: bool = False,
    tune: bool = False,
) -> AttentionOp:
    """Plan, render, compile and cache the op of some stages and a head dim. Everything is built here, not in calls.

    Kernels are compiled for, and loaded on, every visible GPU whose target is the plan's; on the current GPU alone if
    there is none, and in a process of an initialised ``torch.distributed`` job, which leaves other GPUs to other
    processes. On any other GPU the first call compiles and loads them, or raises a ``BackendError`` if that GPU cannot
    run the target's instructions.

    Args:
        kernel: ``(cq, ck)``, extent over queries and over keys of the convolution before the softmax; None: there is
            none.
        head_dim: D, 16..256 in multiples of 8.
        mixed_heads: m: scores are mixed in groups of m heads before the softmax, 1..64; default not at all.
        post_kernel: extent of the convolution after the softmax, default none.
        post_mixed_heads: as ``mixed_heads``, after the softmax.
        window: ``(left, right)``: query i sees keys from i + Nk - Nq - left to i + Nk - Nq + right; -1 is no limit.
        value_head_dim: DV, default D.
        causal: query i sees keys j <= i + Nk - Nq: ``right`` of the window is 0.
        key_padding: ``both``, ``left`` or ``right``.
        mask: ``source`` or ``output``, see :class:`mtagen.Spec`.
        backend: ``auto`` (on the GPU generated kernels, of CUDA C++ or Triton pass by pass, whichever is expected to be
            faster, CUDA where they are close; on the CPU tiled PyTorch ops), ``cuda``, ``triton`` or ``torch``. A
            backend named here never falls back to another.
        target: what to plan for, e.g. ``sm_90a`` (see ``mtagen.TARGETS``), default this machine's GPU, else its CPU.
        dtype: of q, k, v, by its name too (``bf16``, ``bfloat16``); default bf16 on a GPU (fp32 in Triton's
            interpreter). The torch backend takes any of fp16, bf16, fp32 and fp64 unless one is named.
        deterministic: whether equal inputs give bit-equal gradients; default: where
            ``torch.use_deterministic_algorithms`` is on when the backward pass runs. Outputs always are, and every
            gradient but the dq of CUDA's fused backward kernel.
        packed: whether kernels for packed documents are built here, too; else the first call of ``varlen`` builds them.
        dropout: whether calls may drop (``dropout_p``); kernels for it are built besides those without.
        tune: time the planner's candidates, of both backends, on this GPU first (minutes), unless that was done before.
            What it or ``mtagen tune`` finds for this spec is kept in the cache, and every build follows it.

    Raises:
        SpecError: the request is not legal, or an argument is of a wrong type.
        PlanError: it has no plan on this target; the message names the limit.
        BackendError: the backend cannot be used here; there is no GPU to tune on; what tuning chose is not accurate.
    """
    arguments = {**locals()}  # nothing else is local yet
    check_choice("backend", backend, BACKENDS, "is not built")
    if not (target is None or isinstance(target, str)):
        raise SpecError(explain("target", target, "must be a target's name, or None", ("cpu", *TARGETS)))
    for name, flag in (("packed", packed), ("dropout", dropout), ("tune", tune)):
        if not isinstance(flag, bool):
            raise SpecError(explain(name, flag, "must be a bool", (True, False)))
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise SpecError(explain("deterministic", deterministic, "must be a bool, or None", (True, False, None)))
    interpreted = Config.from_env().triton_interpret
    # A GPU that is named is never replaced.
    torch_on_cpu = backend == "torch" or (backend == "auto" and target in (None, "cpu"))
    if target is None:
        target = _INTERPRETER_TARGET if interpreted and backend == "triton" else local_target()
    named = None if dtype is None else dtype_name("dtype", dtype)
    default: DType = "fp32" if interpreted or target == "cpu" else "bf16"
    spec = Spec(
        kernel=kernel,
        head_dim=head_dim,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
        causal=causal,
        key_padding=key_padding,
        mask=mask,
        dtype=named or default,
        mixed_heads=mixed_heads,
        post_kernel=post_kernel,
        post_mixed_heads=post_mixed_heads,
        window=window,
    )
    if tune and backend == "torch":
        raise BackendError(explain("tune", tune, "there are no candidates of the torch backend", GENERATED))
    table = remembered(spec, target)
    if tune and table is None:
        from . import tuning  # only here, for few builds need it

        table = tuning.tune([spec], target).table
        tuning.keep([spec], target, table)
    plan_like = partial(
        plan,
        target=target,
        backend=backend,
        available=("triton",) if interpreted else available_backends(),
        tables=None if table is None else (table, shipped(target)),
    )
    return assemble(
        plan_like(spec),
        torch_on_cpu=torch_on_cpu,
        dtype=named,
        deterministic=deterministic,
        packed=packed,
        dropout=dropout,
        plan_like=plan_like,
        build_again=partial(build, **arguments | {"tune": False}),  # builds follow what tuning has kept
    )
