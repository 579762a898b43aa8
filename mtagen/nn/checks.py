"""Checks of the layer's options and of its calls' arguments."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..errors import InputError, SpecError, check_choice, explain
from ..spec import as_int
from .rope import FrequencyScaling

GateKind: TypeAlias = Literal["scalar", "channel"]
GATES: tuple[GateKind, ...] = get_args(GateKind)


def as_count(value: object) -> int | None:
    """Return a positive integer of any type as an int, and None for anything else."""
    count = as_int(value)
    return None if count is None or count < 1 else count


def check_count(name: str, value: int) -> int:
    """Return ``value`` as an int after checking that it is a positive integer.

    Raises:
        SpecError: it is not a positive int.
    """
    count = as_count(value)
    if count is None:
        raise SpecError(explain(name, value, "must be a positive int", "1, 2, ..."))
    return count


def check_divisor(name: str, value: int, n_heads: int) -> int:
    """Return ``value`` after checking that it divides the number of heads.

    Raises:
        SpecError: it does not divide ``n_heads``.
    """
    divisor = as_count(value)
    if divisor is None or n_heads % divisor:
        legal = [heads for heads in range(1, n_heads + 1) if n_heads % heads == 0]
        raise SpecError(explain(name, value, f"must divide n_heads = {n_heads}", legal))
    return divisor


def check_options(
    group_norm: bool,
    depth_rescale: int | None,
    gate: GateKind | None,
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
        number = as_int(depth_rescale)
        if number is None or number < 0:
            raise SpecError(explain("depth_rescale", depth_rescale, "must be a layer's number", "0, 1, ..., or None"))
        if not group_norm:
            rule = "only the group norm rescales"
            raise SpecError(explain("depth_rescale", depth_rescale, rule, "None, or together with group_norm=True"))
    if gate is not None:
        check_choice("gate", gate, GATES, "must be the name of a gate, or None")
    if rope_theta is not None and not (_is_number(rope_theta) and 0 < rope_theta < torch.inf):
        raise SpecError(explain("rope_theta", rope_theta, "must be a positive number", "e.g. 100000.0, or None"))
    if frequency_scaling is not None:
        if not isinstance(frequency_scaling, FrequencyScaling):
            rule, legal = "must be a FrequencyScaling", "mtagen.nn.FrequencyScaling(factor=...), or None"
            raise SpecError(explain("frequency_scaling", frequency_scaling, rule, legal))
        if rope_theta is None:
            rule = "scales a rotary embedding, and the layer has none"
            raise SpecError(explain("frequency_scaling", frequency_scaling, rule, "None, or together with rope_theta"))
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
    is_packed_shape = x.ndim == 2 or (x.ndim == 3 and x.shape[0] == 1)
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
            raise InputError(explain("positions", _kind(positions), "must be one for each token", legal))
    if max_seqlen is not None and not packed:
        raise InputError(
            explain("max_seqlen", max_seqlen, "is for packed documents", "None, or together with cu_seqlens")
        )


def _kind(x: object) -> object:
    return (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else type(x).__name__
