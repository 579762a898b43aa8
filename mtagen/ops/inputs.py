"""Checks of a call's arguments, before any launch: what was got, the rule, what is legal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from ..documents import Documents
from ..errors import InputError, explain
from ..planner.targets import GRID_X
from ..spec import MAX_NEW_TOKENS, WEIGHTS, Spec

MAX_SPLITS = 2**16 - 1  # each takes a partial result
_LARGEST = sys.float_info.max
_Named: TypeAlias = Sequence[tuple[str, Tensor]]


def check_call(
    spec: Spec, dtypes: tuple[torch.dtype, ...], q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Check q (B, H, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, DV) and the weights before a call.

    Args:
        weights: those called ``spec.WEIGHTS``, in that order; None where the spec has none.

    Returns:
        The weights in the same order, in the shapes of :meth:`Spec.weights`.

    Raises:
        InputError: some argument does not fit the spec or another argument.
    """
    return _checked(spec, dtypes, (("q", q), ("k", k), ("v", v)), weights)


def check_decode(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor | None],
    cache_seqlens: Tensor | None,
    num_splits: int | None,
) -> list[Tensor | None]:
    """As :func:`check_call` for a decode step: q_tail (B, H, n_new + context, D) and caches (B, Hkv, N, ...).

    Raises:
        InputError: some argument does not fit.
    """
    tensors = (("q_tail", q_tail), ("k_cache", k_cache), ("v_cache", v_cache))
    checked = _checked(spec, dtypes, tensors, weights)
    rows, context = q_tail.shape[2], spec.context
    if not 1 <= rows - context <= MAX_NEW_TOKENS:
        sum_of = " + ".join(name for name, used in (("cq - 1", spec.kernel), ("post cq - 1", spec.post_kernel)) if used)
        rule = f"holds {sum_of or 'no query before the new ones'} = {context} context queries" if context else "holds"
        raise InputError(
            explain(
                "q_tail rows",
                rows,
                f"{rule}, then 1..{MAX_NEW_TOKENS} new ones",
                f"{context + 1}..{context + MAX_NEW_TOKENS}",
            )
        )
    if cache_seqlens is not None:
        _check_dense((("cache_seqlens", cache_seqlens),))
        got = (tuple(cache_seqlens.shape), cache_seqlens.dtype, cache_seqlens.device)
        legal = f"shape ({q_tail.shape[0]},), torch.int32, {q_tail.device}"
        if got != ((q_tail.shape[0],), torch.int32, q_tail.device):
            raise InputError(explain("cache_seqlens", got, "one length per batch entry, on q_tail's device", legal))
    if num_splits is not None:
        is_int = isinstance(num_splits, int) and not isinstance(num_splits, bool)
        if not (is_int and 1 <= num_splits <= MAX_SPLITS):
            legal = f"1, 2, ... or None to plan it; at most {MAX_SPLITS}"
            raise InputError(explain("num_splits", num_splits, "must be a positive int", legal))
        outputs = q_tail.shape[0] * q_tail.shape[1] * (rows - context)
        if outputs * num_splits > GRID_X:
            rule = f"{outputs} rows of outputs have as many partial results each, {GRID_X} together at most"
            raise InputError(explain("num_splits", num_splits, rule, f"{GRID_X // outputs} or less, or None"))
    return checked


def check_varlen(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor | None],
    documents: Documents,
) -> list[Tensor | None]:
    """As :func:`check_call` for packed documents: q (total_q, H, D), k (total_k, Hkv, D) and v (total_k, Hkv, DV).

    Raises:
        InputError: some argument does not fit. What cu_seq_q and cu_seq_k hold, and whether a document is longer than
            max_q or max_k, is looked at on the CPU only.
    """
    checked = check_packed(spec, dtypes, q, k, v, weights)
    check_documents(documents, len(q), len(k), q.device)
    return checked


def check_packed(
    spec: Spec, dtypes: tuple[torch.dtype, ...], q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """As :func:`check_call` for rows of packed documents: q (n_q, H, D), k (n_k, Hkv, D) and v (n_k, Hkv, DV).

    Raises:
        InputError: some argument does not fit.
    """
    tensors = (("q", q), ("k", k), ("v", v))
    _check_dense(tensors)
    for name, x in tensors:
        if x.ndim != 3:
            rule = "must have 3 dimensions where documents are packed"
            raise InputError(explain(f"{name}.shape", tuple(x.shape), rule, "(total, heads, head_dim)"))
    batch = tuple((name, x.transpose(0, 1).unsqueeze(0)) for name, x in tensors)  # as one sequence
    return _checked(spec, dtypes, batch, weights)


def check_documents(documents: Documents, total_q: int, total_k: int, device: torch.device) -> None:
    """Check where packed documents of so many queries and keys are.

    Raises:
        InputError: some value does not fit. What cu_seq_q and cu_seq_k hold, and whether a document is longer than
            max_q or max_k, is looked at on the CPU only.
    """
    cu_seq_q, cu_seq_k, max_q, max_k = documents
    for name, longest in (("max_q", max_q), ("max_k", max_k)):
        if isinstance(longest, bool) or not isinstance(longest, (int, torch.SymInt)) or not longest >= 0:
            raise InputError(explain(name, longest, "must be the length of the longest document", "0, 1, 2, ..."))
    _check_dense([("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)])
    for axis, cu_seq, total, longest in (("q", cu_seq_q, total_q, max_q), ("k", cu_seq_k, total_k, max_k)):
        name, got = f"cu_seq_{axis}", (cu_seq.ndim, cu_seq.dtype, cu_seq.device)
        if got != (1, torch.int32, device) or len(cu_seq) == 0:
            rule = "must be where documents begin, and the last one's end"
            got_shape = (tuple(cu_seq.shape), *got[1:])
            raise InputError(explain(name, got_shape, rule, f"shape (documents + 1,), torch.int32, {device}"))
        if cu_seq.is_cpu and type(cu_seq) is Tensor and not torch.compiler.is_compiling():
            values = cu_seq.tolist()
            if values[0] != 0 or values[-1] > total or values != sorted(values):
                rule = f"documents lie one after the other in {total} rows, the first from row 0 on"
                raise InputError(explain(name, values, rule, f"0, ..., {total} at most, none below the last"))
            needed = max((end - begin for begin, end in pairwise(values)), default=0)
            if longest < needed:
                rule = "must be the length of the longest document"
                raise InputError(explain(f"max_{axis}", longest, rule, f"{needed} or more"))
    if len(cu_seq_q) != len(cu_seq_k):
        counts = len(cu_seq_q) - 1, len(cu_seq_k) - 1
        raise InputError(explain("documents", counts, "cu_seq_q and cu_seq_k must have as many", "the same length"))


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """``scale``, by default head_dim ** -0.5.

    Raises:
        InputError: not a finite number.
    """
    if scale is None:
        return float(head_dim**-0.5)
    # torch.compile traces no math.isfinite of a symbol.
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -_LARGEST <= scale <= _LARGEST:
        raise InputError(
            explain("scale", scale, "must be a finite Python number", "e.g. head_dim ** -0.5 (the default)")
        )
    return float(scale)


def _checked(
    spec: Spec, dtypes: tuple[torch.dtype, ...], tensors: _Named, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    _check_dense(tensors)
    _check_tensors(dtypes, tensors)
    _check_shapes(spec, tensors)
    first = tensors[0]
    return [_checked_weight(spec, first, name, weight) for name, weight in zip(WEIGHTS, weights, strict=True)]


def _check_dense(tensors: Sequence[tuple[str, object]]) -> None:
    for name, x in tensors:
        if not isinstance(x, Tensor):
            raise InputError(explain(name, type(x).__name__, "must be a tensor", "torch.Tensor"))
        if x.layout is not torch.strided or x.is_nested:
            got = "a nested tensor" if x.is_nested else x.layout
            raise InputError(explain(f"{name}.layout", got, "must be dense", torch.strided))


def _check_tensors(dtypes: tuple[torch.dtype, ...], tensors: _Named) -> None:
    first, q = tensors[0]
    dtype, device = q.dtype, q.device
    if dtype not in dtypes:
        rule = "this op was not built for it"
        raise InputError(explain(f"{first}.dtype", dtype, rule, f"{dtypes}, or build(dtype=...)"))
    for name, x in tensors:
        if x.ndim != 4:
            legal = "(B, heads, N, head_dim)"
            raise InputError(explain(f"{name}.shape", tuple(x.shape), "must have 4 dimensions", legal))
        if x.dtype != dtype:
            raise InputError(explain(f"{name}.dtype", x.dtype, f"must equal {first}.dtype", dtype))
        if x.device != device:
            raise InputError(explain(f"{name}.device", x.device, f"must be on {first}'s device", device))
        if x.stride()[3] != 1 and x.shape[3] > 1:
            legal = f"{name}.contiguous()"
            raise InputError(explain(f"{name}.stride()", tuple(x.stride()), "the last stride must be 1", legal))


def _check_shapes(spec: Spec, tensors: _Named) -> None:
    (q_name, q), (k_name, k), (_, v) = tensors
    shapes = q.shape, k.shape, v.shape
    (batch, heads, n_q, _), (_, kv_heads, n_k, _), _ = shapes
    if kv_heads == 0 or heads % kv_heads:
        rule = f"{q_name}'s heads must be a multiple of {k_name}'s"
        raise InputError(explain("heads", (heads, kv_heads), rule, "H = group * Hkv"))
    legal_shapes = (
        (batch, heads, n_q, spec.head_dim),
        (batch, kv_heads, n_k, spec.head_dim),
        (batch, kv_heads, n_k, spec.value_head_dim),
    )
    if shapes != legal_shapes:
        rule = "does not fit the spec and the other tensors"
        given = zip(tensors, legal_shapes, strict=True)
        name, x, legal = next((name, x, legal) for (name, x), legal in given if x.shape != legal)
        raise InputError(explain(f"{name}.shape", tuple(x.shape), rule, legal))


def _checked_weight(spec: Spec, first: tuple[str, Tensor], name: str, weight: Tensor | None) -> Tensor | None:
    """A weight in its shape, or None where there is no such stage."""
    if (weight is not None) != (name in spec.weight_names):
        has = "this op has such a stage" if weight is None else "this op was built without such a stage"
        raise InputError(explain(name, _kind(weight), has, spec.weight_names or "no weight"))
    if weight is None:
        return None
    _check_dense(((name, weight),))
    q_name, q = first
    if weight.device != q.device:
        raise InputError(explain(f"{name}.device", weight.device, f"must be on {q_name}'s device", q.device))
    if weight.dtype not in (torch.float32, q.dtype):
        legal = (torch.float32, q.dtype)
        raise InputError(explain(f"{name}.dtype", weight.dtype, "must be fp32 or the dtype of q", legal))
    return _shaped(spec, name, weight, q.shape[1])


def _kind(x: object) -> object:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else x


def _shaped(spec: Spec, name: str, weight: Tensor, heads: int) -> Tensor:
    """A weight in its shape, in which it may come without the axis of groups, if there is one, or with one of length 1.

    Kernels may have an axis of input channels, as the weights of torch's convolutions.
    """
    mixed = spec.mixed.get(name)
    if mixed and heads % mixed:
        groups = f"the op mixes groups of {mixed} heads ({name})"
        raise InputError(explain("heads", heads, groups, f"multiples of {mixed}"))
    shape = spec.weight_shape(name, heads)
    if weight.shape == shape:
        return weight
    if not mixed and weight.shape == (heads, 1, *shape[1:]):
        return weight.squeeze(1)
    if mixed == heads and weight.shape == shape[1:]:
        return weight.unsqueeze(0)
    rule = f"one (m, m) matrix per group of {mixed} heads" if mixed else "one (cq, ck) kernel per query head"
    others = f" or {shape[1:]}" if mixed == heads else "" if mixed else f" or {(heads, 1, *shape[1:])}"
    raise InputError(explain(f"{name}.shape", tuple(weight.shape), rule, f"{shape}{others}"))
