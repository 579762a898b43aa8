"""Checks of a call's arguments, before any launch: what was got, the rule, what is legal."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import InputError, explain
from ..spec import MAX_NEW_TOKENS, Spec

MAX_SPLITS = 2**16 - 1  # each takes a partial result
_LARGEST = sys.float_info.max


def check_call(
    spec: Spec, dtypes: tuple[torch.dtype, ...], q: Tensor, k: Tensor, v: Tensor, weights: Mapping[str, Tensor | None]
) -> None:
    """Check q (B, H, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, DV) and the weights before a call.

    Args:
        weights: all of ``spec.WEIGHTS`` by name; those that the spec has are as :meth:`Spec.weights` says, the others
            None.

    Raises:
        InputError: some argument does not fit the spec or another argument.
    """
    tensors = {"q": q, "k": k, "v": v}
    _check_tensors(tensors, _check_weights(spec, weights), dtypes)
    _check_shapes(spec, tensors, weights)


def check_decode(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Mapping[str, Tensor | None],
    cache_seqlens: Tensor | None,
    num_splits: int | None,
) -> None:
    """As :func:`check_call` for a decode step: q_tail (B, H, n_new + context, D) and caches (B, Hkv, N, ...).

    Raises:
        InputError: some argument does not fit.
    """
    tensors = {"q_tail": q_tail, "k_cache": k_cache, "v_cache": v_cache}
    _check_tensors(tensors, _check_weights(spec, weights), dtypes)
    _check_shapes(spec, tensors, weights)
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
        _check_is_tensor("cache_seqlens", cache_seqlens)
        got = (tuple(cache_seqlens.shape), cache_seqlens.dtype, cache_seqlens.device)
        legal = f"shape ({q_tail.shape[0]},), torch.int32, {q_tail.device}"
        if got != ((q_tail.shape[0],), torch.int32, q_tail.device):
            raise InputError(explain("cache_seqlens", got, "one length per batch entry, on q_tail's device", legal))
    if num_splits is not None:
        is_int = isinstance(num_splits, int) and not isinstance(num_splits, bool)
        if not (is_int and 1 <= num_splits <= MAX_SPLITS):
            legal = f"1, 2, ... or None to plan it; at most {MAX_SPLITS}"
            raise InputError(explain("num_splits", num_splits, "must be a positive int", legal))


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """``scale``, by default head_dim ** -0.5.

    Raises:
        InputError: not a finite number.
    """
    if scale is None:
        return float(head_dim**-0.5)
    # torch.compile traces no math.isfinite of a symbol.
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -_LARGEST <= scale <= _LARGEST:
        raise InputError(explain("scale", scale, "must be a finite number", "e.g. head_dim ** -0.5 (the default)"))
    return float(scale)


def _check_is_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputError(explain(name, type(x).__name__, "must be a tensor", "torch.Tensor"))
    if x.layout is not torch.strided or x.is_nested:
        got = "a nested tensor" if x.is_nested else x.layout
        raise InputError(explain(f"{name}.layout", got, "must be dense", torch.strided))


def _check_weights(spec: Spec, weights: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The weights that there are, which must be those that the spec has."""
    for name, weight in weights.items():
        if (weight is not None) != (name in spec.weight_names):
            has = "this op has such a stage" if weight is None else "this op was built without such a stage"
            raise InputError(explain(name, _kind(weight), has, spec.weight_names or "no weight"))
    return {name: weight for name, weight in weights.items() if weight is not None}


def _kind(x: object) -> object:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else x


def _check_tensors(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    for name, x in tensors.items():
        _check_is_tensor(name, x)
    for name, x in weights.items():
        _check_is_tensor(name, x)
    first, q = next(iter(tensors.items()))
    dtype, device = q.dtype, q.device
    if dtype not in dtypes:
        rule = "this op was not built for it"
        raise InputError(explain(f"{first}.dtype", dtype, rule, f"{dtypes}, or build(dtype=...)"))
    for name, x in tensors.items():
        if x.ndim != 4:
            raise InputError(
                explain(f"{name}.shape", tuple(x.shape), "must have 4 dimensions", "(B, heads, N, head_dim)")
            )
        if x.dtype != dtype:
            raise InputError(explain(f"{name}.dtype", x.dtype, f"must equal {first}.dtype", dtype))
        if x.device != device:
            raise InputError(explain(f"{name}.device", x.device, f"must be on {first}'s device", device))
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise InputError(
                explain(f"{name}.stride()", tuple(x.stride()), "the last stride must be 1", f"{name}.contiguous()")
            )
    for name, weight in weights.items():
        if weight.device != device:
            raise InputError(explain(f"{name}.device", weight.device, f"must be on {first}'s device", device))
        if weight.dtype not in (torch.float32, dtype):
            legal = (torch.float32, dtype)
            raise InputError(explain(f"{name}.dtype", weight.dtype, "must be fp32 or the dtype of q", legal))


def _check_shapes(spec: Spec, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor | None]) -> None:
    q, k, _ = tensors.values()
    batch, heads, n_q, _ = q.shape
    _, kv_heads, n_k, _ = k.shape
    if kv_heads == 0 or heads % kv_heads:
        q_name, k_name, _ = tensors
        rule = f"{q_name}'s heads must be a multiple of {k_name}'s"
        raise InputError(explain("heads", (heads, kv_heads), rule, "H = group * Hkv"))
    legal_shapes = (
        (batch, heads, n_q, spec.head_dim),
        (batch, kv_heads, n_k, spec.head_dim),
        (batch, kv_heads, n_k, spec.value_head_dim),
    )
    for (name, x), legal in zip(tensors.items(), legal_shapes, strict=True):
        if x.shape != legal:
            raise InputError(
                explain(f"{name}.shape", tuple(x.shape), "does not fit the spec and the other tensors", legal)
            )
    for name in spec.weight_names:
        weight, shape = weights[name], spec.weight_shape(name, heads)
        assert weight is not None
        if name in spec.kernels:
            # As the weight of torch's convolutions, it may have an axis of input channels.
            rule, other = "one (cq, ck) kernel per query head", (heads, 1, *shape[1:])
        else:
            mixed = spec.mixed[name]
            if heads % mixed:
                groups = f"the op mixes groups of {mixed} heads ({name})"
                raise InputError(explain("heads", heads, groups, f"multiples of {mixed}"))
            rule, other = f"one (m, m) matrix per group of {mixed} heads", shape[1:] if mixed == heads else shape
        if weight.shape not in (shape, other):
            shapes = shape if other == shape else f"{shape} or {other}"
            raise InputError(explain(f"{name}.shape", tuple(weight.shape), rule, shapes))
