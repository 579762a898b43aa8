"""Checks of arguments that built ops and :func:`mtagen.reference` share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .errors import InputError, explain

_LARGEST = sys.float_info.max
Named: TypeAlias = Sequence[tuple[str, Tensor]]


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Return ``scale`` as a float, by default head_dim ** -0.5.

    Raises:
        InputError: ``scale`` is not a finite number.
    """
    if scale is None:
        return float(head_dim**-0.5)
    # Compared with the largest float, because torch.compile cannot trace math.isfinite of a symbol.
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -_LARGEST <= scale <= _LARGEST:
        raise InputError(
            explain("scale", scale, "must be a finite Python number", "e.g. head_dim ** -0.5 (the default)")
        )
    return float(scale)


def check_dense(tensors: Sequence[tuple[str, object]]) -> None:
    """Check that each named value is a dense tensor.

    Raises:
        InputError: a value is no tensor, or a nested or sparse one.
    """
    for name, x in tensors:
        if not isinstance(x, Tensor):
            raise InputError(explain(name, type(x).__name__, "must be a tensor", "torch.Tensor"))
        if x.layout is not torch.strided or x.is_nested:
            got = "a nested tensor" if x.is_nested else x.layout
            raise InputError(explain(f"{name}.layout", got, "must be dense", torch.strided))


def check_batch(tensors: Named, head_dims: tuple[int, int]) -> None:
    """Check that queries (B, H, Nq, D), keys (B, Hkv, Nk, D) and values (B, Hkv, Nk, DV) fit each other.

    Args:
        tensors: queries, keys and values, each with its name.
        head_dims: D and DV.

    Raises:
        InputError: a tensor has another rank, dtype, device or shape.
    """
    (q_name, q), (k_name, k), (_, v) = tensors
    dtype, device = q.dtype, q.device
    for name, x in tensors:
        if x.ndim != 4:
            legal = "(B, heads, N, head_dim)"
            raise InputError(explain(f"{name}.shape", tuple(x.shape), "must have 4 dimensions", legal))
        if x.dtype != dtype:
            raise InputError(explain(f"{name}.dtype", x.dtype, f"must equal {q_name}.dtype", dtype))
        if x.device != device:
            raise InputError(explain(f"{name}.device", x.device, f"must be on {q_name}'s device", device))
    shapes, (head_dim, value_head_dim) = (q.shape, k.shape, v.shape), head_dims
    (batch, heads, n_q, _), (_, kv_heads, n_k, _), _ = shapes
    if kv_heads == 0 or heads % kv_heads:
        rule = f"{q_name}'s heads must be a multiple of {k_name}'s"
        raise InputError(explain("heads", (heads, kv_heads), rule, "H = group * Hkv"))
    legal_shapes = (
        (batch, heads, n_q, head_dim),
        (batch, kv_heads, n_k, head_dim),
        (batch, kv_heads, n_k, value_head_dim),
    )
    if shapes != legal_shapes:
        rule = "does not fit the spec and the other tensors"
        given = zip(tensors, legal_shapes, strict=True)
        name, x, legal_shape = next((name, x, legal) for (name, x), legal in given if x.shape != legal)
        raise InputError(explain(f"{name}.shape", tuple(x.shape), rule, legal_shape))


def shaped_weight(
    queries: tuple[str, Tensor], name: str, weight: Tensor, mixed: int | None, shape: tuple[int, ...]
) -> Tensor:
    """Check a weight and return it in the shape ``shape``.

    A matrix for one group of heads may come without the axis of groups. A convolution's weight may
    come with an axis of input channels, like the weights of torch's convolutions.

    Args:
        queries: the name and the tensor of queries.
        name: the weight's name.
        weight: the weight as it was passed.
        mixed: heads of a group that the weight mixes, or None if it is a convolution's.
        shape: (H, cq, ck), or (H / m, m, m).

    Raises:
        InputError: the weight does not fit the queries, or has another shape.
    """
    q_name, q = queries
    check_dense(((name, weight),))
    if weight.device != q.device:
        raise InputError(explain(f"{name}.device", weight.device, f"must be on {q_name}'s device", q.device))
    if weight.dtype not in (torch.float32, q.dtype):
        legal = (torch.float32, q.dtype)
        raise InputError(explain(f"{name}.dtype", weight.dtype, "must be fp32 or the dtype of q", legal))
    heads = q.shape[1]
    if mixed and heads % mixed:
        groups = f"the op mixes groups of {mixed} heads ({name})"
        raise InputError(explain("heads", heads, groups, f"multiples of {mixed}"))
    if weight.shape == shape:
        return weight
    if not mixed and weight.shape == (heads, 1, *shape[1:]):
        return weight.squeeze(1)
    if mixed == heads and weight.shape == shape[1:]:
        return weight.unsqueeze(0)
    rule = f"one (m, m) matrix per group of {mixed} heads" if mixed else "one (cq, ck) kernel per query head"
    others = f" or {shape[1:]}" if mixed == heads else "" if mixed else f" or {(heads, 1, *shape[1:])}"
    raise InputError(explain(f"{name}.shape", tuple(weight.shape), rule, f"{shape}{others}"))
