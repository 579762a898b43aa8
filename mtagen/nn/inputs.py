"""Checks of the layer's options and of its calls' arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError, SpecError, check_choice, explain
from .rope import FrequencyScaling

GATES = ("scalar", "channel")


def is_count(value: object) -> bool:
    """Return whether ``value`` is a positive int."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_count(name: str, value: int) -> int:
    """Return ``value`` after checking that it is a positive int.

    Raises:
        SpecError: it is not a positive int.
    """
    if not is_count(value):
        raise SpecError(explain(name, value, "must be a positive int", "1, 2, ..."))
    return value


def check_divisor(name: str, value: int, n_heads: int) -> int:
    """Return ``value`` after checking that it divides the number of heads.

    Raises:
        SpecError: it does not divide ``n_heads``.
    """
    if not is_count(value) or n_heads % value:
        legal = [heads for heads in range(1, n_heads + 1) if n_heads % heads == 0]
        raise SpecError(explain(name, value, f"must divide n_heads = {n_heads}", legal))
    return value


def check_options(
    group_norm: bool,
    depth_rescale: int | None,
    gate: str | None,
    rope_theta: float | None,
    frequency_scaling: FrequencyScaling | None,
    dropout: float,
) -> None:
    """Check the options of the layer that ``mtagen.build`` does not check.

    Raises:
        SpecError: an option is not legal.
    """
    if not isinstance(group_norm, bool):
        raise SpecError(explain("group_norm", group_norm, "must be a bool", (True, False)))
    if depth_rescale is not None:
        if not (is_count(depth_rescale) or (depth_rescale == 0 and type(depth_rescale) is int)):
            raise SpecError(explain("depth_rescale", depth_rescale, "must be a layer's number", "0, 1, ..., or None"))
        if not group_norm:
            rule = "it is the norm that rescales"
            raise SpecError(explain("depth_rescale", depth_rescale, rule, "group_norm=True besides, or None"))
    if gate is not None:
        check_choice("gate", gate, GATES, "must be one, or None")
    if rope_theta is not None and not (_is_number(rope_theta) and 0 < rope_theta < torch.inf):
        raise SpecError(explain("rope_theta", rope_theta, "must be a positive number", "e.g. 100000.0, or None"))
    if frequency_scaling is not None:
        if not isinstance(frequency_scaling, FrequencyScaling):
            rule, legal = "must be a FrequencyScaling", "mtagen.nn.FrequencyScaling(factor=...), or None"
            raise SpecError(explain("frequency_scaling", frequency_scaling, rule, legal))
        if rope_theta is None:
            rule = "there is no rotary embedding"
            raise SpecError(explain("frequency_scaling", frequency_scaling, rule, "rope_theta besides, or None"))
    if not (_is_number(dropout) and 0 <= dropout < 1):
        raise SpecError(explain("dropout", dropout, "must be a probability less than 1", "0 <= dropout < 1"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_input(
    x: Tensor, dim: int, positions: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> None:
    """Check the arguments of a call.

    Raises:
        InputError: an argument does not fit.
    """
    if not isinstance(x, Tensor):
        raise InputError(explain("x", type(x).__name__, "must be a tensor", "torch.Tensor"))
    if not x.is_floating_point():
        raise InputError(explain("x.dtype", x.dtype, "must be of floating point", "the dtype of the parameters"))
    packed = cu_seqlens is not None
    is_packed_shape = x.ndim == 2 or (x.ndim == 3 and len(x) == 1)
    if x.shape[-1:] != (dim,) or not (is_packed_shape if packed else x.ndim == 3):
        rule = "does not fit the layer" + (" and packed documents" if packed else "")
        legal = f"(total, {dim}) or (1, total, {dim})" if packed else f"(B, N, {dim})"
        raise InputError(explain("x.shape", tuple(x.shape), rule, legal))
    if positions is not None:
        count = x.shape[-2]
        shapes = ((count,), (1, count)) if packed else ((count,), (1, count), tuple(x.shape[:2]))
        is_integer = isinstance(positions, Tensor) and positions.dtype in (torch.int32, torch.int64)
        if not is_integer or tuple(positions.shape) not in shapes or positions.device != x.device:
            legal = f"int64 or int32, {x.device}, one of the shapes {shapes}"
            raise InputError(explain("positions", _kind(positions), "one for each token", legal))
    if cu_seqlens is not None:
        is_tensor = isinstance(cu_seqlens, Tensor)
        got = (cu_seqlens.ndim, cu_seqlens.dtype, cu_seqlens.device) if is_tensor else None
        if got != (1, torch.int32, x.device) or len(cu_seqlens) == 0:
            rule, legal = "where documents begin, and the last one's end", f"(documents + 1,), torch.int32, {x.device}"
            raise InputError(explain("cu_seqlens", _kind(cu_seqlens), rule, legal))
        is_length = isinstance(max_seqlen, (int, torch.SymInt)) and not isinstance(max_seqlen, bool)
        if max_seqlen is not None and not (is_length and max_seqlen >= 0):
            rule = "must be the length of the longest document"
            raise InputError(explain("max_seqlen", max_seqlen, rule, "0, 1, 2, ..., or None"))
    elif max_seqlen is not None:
        raise InputError(explain("max_seqlen", max_seqlen, "is of packed documents", "cu_seqlens besides, or None"))


def _kind(x: object) -> object:
    return (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else type(x).__name__
