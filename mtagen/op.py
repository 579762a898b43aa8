"""``build`` makes a callable, differentiable op from the shapes of a model's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from .spec import OPTIONS, DType, Expression, KeyPadding, Mask, Spec, options_of

_INTERPRETER_TARGET = "generic"  # small tiles: the interpreter pays per operation


def build(
    kernel: tuple[int, int] | None,
    head_dim: int,
    *,
    mixed_heads: int | None = None,
    post_kernel: tuple[int, int] | None = None,
    post_mixed_heads: int | None = None,
    dynamic_ranks: tuple[int, int] | None = None,
    post_dynamic_ranks: tuple[int, int] | None = None,
    window: tuple[int, int] = (-1, -1),
    scores: Expression | None = None,
    convolved: Expression | None = None,
    logits: Expression | None = None,
    visible: Expression | None = None,
    parameters: Mapping[str, str] | None = None,
    constants: Sequence[str] = (),
    sink: bool = False,
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
    page_size: int | None = None,
    tune: bool = False,
) -> AttentionOp:
    """Plan, render, compile and cache the op of the given stages.

    Calls compile nothing, except the first ``varlen`` call of an op built without ``packed=True``,
    the first ``paged`` call with a page size that the op was not built for, and the first call on
    another GPU.

    Kernels are compiled for, and loaded on, every visible GPU whose target is the plan's. If no GPU
    has that target, or if ``torch.distributed`` is initialised (other GPUs then belong to other
    processes), only the current GPU is used. On any other GPU the first call compiles and loads the
    kernels, or raises a ``BackendError`` if that GPU cannot run the target's instructions.

    Args:
        kernel: ``(cq, ck)``, extent over queries and over keys of the convolution before the
            softmax; None for no convolution.
        head_dim: D, 16..256 in multiples of 8.
        mixed_heads: m: scores are mixed in groups of m heads before the softmax, 1..64; default no
            mixing.
        post_kernel: extent of the convolution after the softmax; default no convolution.
        post_mixed_heads: as ``mixed_heads``, after the softmax.
        dynamic_ranks: ``(rank_q, rank_k)``, 0..4 each: adds to the matrices of ``mixed_heads`` a matrix for
            each query and one for each key, of these ranks and a diagonal, as DCMHA (arXiv 2405.08553)
            does. Each call passes ``query_factors`` and ``key_factors``; rank 0 leaves one out. For
            batches and decode steps, not for ``varlen`` and ``paged``. Default neither.
        post_dynamic_ranks: as ``dynamic_ranks``, for ``post_mixed_heads``; calls pass
            ``post_query_factors`` and ``post_key_factors``.
        window: ``(left, right)``: query i sees keys from i + Nk - Nq - left to i + Nk - Nq + right; -1 is no limit.
        scores: replaces the input of the first convolution by an expression in s, the scaled score:
            a text such as ``50 * tanh(s / 50)``, or a function such as
            ``lambda s, i, j: s - 0.1 * (i - j)``; see :mod:`mtagen.expressions`. Default s.
        convolved: replaces the input of the mixing by an expression in s, the score after the
            convolution.
        logits: replaces the input of the softmax by an expression in s, the score after the
            convolution and the mixing.
        visible: which keys a query sees, besides ``causal`` and ``window``: a condition in i, j and
            parameters, which b may index, such as ``(j <= i) | (j < prefix[b])`` with ``causal=False``, ``i // 64 ==
            j // 64`` or ``(j < 4) | (i - j < 128)``. Parameters that it reads are integers.
        parameters: declares the tensors that expressions read, as name -> axes; each call passes the
            tensors. Axes are ``b`` (batch entries), ``h`` (heads of queries), ``i`` or ``j``
            (tokens) and numbers (the entries of a table): ``{"slopes": "h", "table": "h,65"}``. Those
            of ``visible`` may count blocks of tokens, too: ``{"blocks": "b,i//64,j//64"}``.
        constants: names of parameters that need no gradient. The backward pass does not compute their
            gradients.
        sink: adds a learned logit per head to the softmax's denominator; each call passes ``sink``,
            shape (H,).
        value_head_dim: DV, default D.
        causal: query i sees only keys j <= i + Nk - Nq; the same as a window whose ``right`` is 0.
        key_padding: ``both``, ``left`` or ``right``.
        mask: ``source`` or ``output``, see :class:`mtagen.Spec`.
        backend: ``auto``, ``cuda``, ``triton`` or ``torch``. ``auto`` uses generated kernels on a
            GPU: each pass gets CUDA C++ or Triton, whichever is expected to be faster, and CUDA
            where the two are close. On the CPU ``auto`` uses tiled PyTorch ops. A backend named
            here never falls back to another.
        target: the GPU (or ``cpu``) to plan for, e.g. ``sm_90a`` (see ``mtagen.TARGETS``); default
            this machine's GPU, else its CPU.
        dtype: the dtype of q, k and v, or its name (``bf16``, ``bfloat16``); default bf16 on a GPU
            (fp32 in Triton's interpreter). The torch backend takes any of fp16, bf16, fp32 and fp64
            unless a dtype is named.
        deterministic: whether equal inputs give bit-equal gradients; default: as
            ``torch.use_deterministic_algorithms`` says when the backward pass runs. Outputs are
            always bit-equal, and so is every gradient except the dq of CUDA's fused backward
            kernel.
        packed: whether to build the kernels for packed documents, too. Otherwise the first call of
            ``varlen`` builds them.
        dropout: whether calls may pass ``dropout_p``. If so, kernels with and without dropout are
            built.
        page_size: tokens of a page, a power of two, to build the kernels for calls of ``paged``, too.
            Otherwise the first call with a page size builds them.
        tune: whether to time the planner's candidates of both backends on this GPU first (minutes).
            The cache stores the results of each spec, also those of ``mtagen tune``. Every build uses
            stored results, and does not tune again.

    Raises:
        SpecError: the request is not legal, or an argument is of a wrong type.
        PlanError: the request has no plan on this target; the message names the limit.
        BackendError: the backend cannot be used here; there is no GPU to tune on; the tuned plan is
            not accurate.
    """
    arguments = {**locals()}  # only the arguments are local so far
    check_choice("backend", backend, BACKENDS, "is not the name of a backend")
    if not (target is None or isinstance(target, str)):
        raise SpecError(explain("target", target, "must be a target's name, or None", ("cpu", *TARGETS)))
    for name, flag in (("packed", packed), ("dropout", dropout), ("tune", tune)):
        if not isinstance(flag, bool):
            raise SpecError(explain(name, flag, "must be a bool", (True, False)))
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise SpecError(explain("deterministic", deterministic, "must be a bool, or None", (True, False, None)))
    interpreted = Config.from_env().triton_interpret
    # A target that the caller names is never replaced by the CPU.
    torch_on_cpu = backend == "torch" or (backend == "auto" and target in (None, "cpu"))
    if target is None:
        target = _INTERPRETER_TARGET if interpreted and backend == "triton" else local_target()
    named = None if dtype is None else dtype_name("dtype", dtype)
    default: DType = "fp32" if interpreted or target == "cpu" else "bf16"
    fields = {name: arguments[name] for name in OPTIONS} | {"dtype": named or default, "parameters": parameters or ()}
    spec = Spec(**fields)
    if tune and backend == "torch":
        legal = f"False, or one of the backends {GENERATED}"
        raise BackendError(explain("tune", tune, "the torch backend has no kernels to tune", legal))
    table = remembered(spec, target)
    if tune and table is None:
        from . import tuning  # imported only here, because few builds need it

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
        page_size=replace(spec, page_size=page_size).page_size,
        plan_like=plan_like,
        # A build uses stored tuning results anyway.
        build_again=partial(build, **arguments | options_of(spec) | {"tune": False}),
    )
