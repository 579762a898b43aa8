"""Checks of arguments that built ops and :func:`mtagen.reference` share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .dtypes import ARGUMENT_DTYPES
from .errors import InputError, explain
from .spec import BATCH, CHECKED_INTEGERS, PACKED, SINK, Argument

_LARGEST = sys.float_info.max
Named: TypeAlias = Sequence[tuple[str, Tensor]]


def _deciding(rows: Sequence[Argument]) -> list[int]:
    """Return which extent decides each of D, DV and the extents of q, k and v: the first with the same symbol."""
    symbols = ["D", "DV", *(symbol for argument in rows for symbol in argument.shape)]
    return [symbols.index(symbol) for symbol in symbols]


_DECIDING = {False: _deciding(BATCH), True: _deciding(PACKED)}  # by whether documents are packed


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
            legal = f"{torch.strided}; packed documents are for op.varlen"
            raise InputError(explain(f"{name}.layout", got, "must be dense", legal))


def check_batch(tensors: Named, head_dims: tuple[int, int], *, packed: bool = False) -> None:
    """Check that queries (B, H, Nq, D), keys (B, Hkv, Nk, D) and values (B, Hkv, Nk, DV) fit each other.

    Args:
        tensors: queries, keys and values, each with its name.
        head_dims: D and DV.
        packed: whether they are packed documents: (total_q, H, D), (total_k, Hkv, D) and (total_k, Hkv, DV).

    Raises:
        InputError: a tensor has another rank, dtype, device or shape.
    """
    (q_name, q), (k_name, k), (_, v) = tensors
    dtype, device = q.dtype, q.device
    for name, x in tensors:
        if x.ndim != (3 if packed else 4):
            rule = "must have 3 dimensions where documents are packed" if packed else "must have 4 dimensions"
            legal = "(total, heads, head_dim)" if packed else "(B, heads, N, head_dim)"
            raise InputError(explain(f"{name}.shape", tuple(x.shape), rule, legal))
        if x.dtype != dtype:
            legal = f"{dtype}: {name}.to({q_name}.dtype), or torch.autocast"
            raise InputError(explain(f"{name}.dtype", x.dtype, f"must equal {q_name}.dtype", legal))
        if x.device != device:
            legal = f"{device}: {name}.to({q_name}.device)"
            raise InputError(explain(f"{name}.device", x.device, f"must be on {q_name}'s device", legal))
    heads, kv_heads, rows = q.shape[1], k.shape[1], 0 if packed else 2
    if kv_heads == 0 or heads % kv_heads:
        rule, legal = f"{q_name}'s heads must be a multiple of {k_name}'s", "H = group * Hkv"
        if k.shape[rows] and q.shape[rows] % k.shape[rows] == 0:
            legal += f", or if axes are exchanged, {_exchanged(q_name, q)} and the same of the others"
        raise InputError(explain("heads", (heads, kv_heads), rule, legal))
    extents = [*head_dims, *q.shape, *k.shape, *v.shape]
    legal_extents = [extents[i] for i in _DECIDING[packed]]
    if extents != legal_extents:
        rule, ndim = "does not fit the spec and the other tensors", q.ndim
        for number, (name, x) in enumerate(tensors):
            legal_shape = tuple(legal_extents[2 + number * ndim :][:ndim])
            if x.shape != legal_shape:
                raise InputError(explain(f"{name}.shape", tuple(x.shape), rule, legal_shape))


def _exchanged(name: str, x: Tensor) -> str:
    """The call that brings heads to the axis where they belong, from that of rows."""
    return f"{name}.transpose(0, 1)" if x.ndim == 3 else f"{name}.transpose(1, 2)"


def _check_layout(queries: tuple[str, Tensor], name: str, weight: Tensor, mixed: int | None) -> None:
    """Check that heads and rows of the queries are not exchanged, where a weight of these heads does not fit.

    Raises:
        InputError: the weight has another number of heads, and fits the queries' rows as if they were heads.
    """
    q_name, q = queries
    heads, rows = q.shape[1], q.shape[0 if q.ndim == 3 else 2]
    if weight.ndim < (2 if mixed else 3):
        return
    theirs = weight.shape[0] * (mixed if mixed and weight.ndim == 3 else 1)
    if heads != theirs == rows:
        layout = "(total, H, D)" if q.ndim == 3 else "(B, H, N, D)"
        rule = f"the layout is {layout}: this tensor has {heads} heads, and {name} has {theirs}"
        legal = f"{_exchanged(q_name, q)}, and the same of keys and values"
        raise InputError(explain(f"{q_name}.shape", tuple(q.shape), rule, legal))


def check_groups(name: str, heads: int, mixed: int) -> None:
    """Check that heads can be divided into the groups that the weight ``name`` mixes.

    Raises:
        InputError: they cannot.
    """
    if heads % mixed:
        groups = f"the op mixes groups of {mixed} heads ({name})"
        raise InputError(explain("heads", heads, groups, f"multiples of {mixed}"))


def shaped_weight(
    queries: tuple[str, Tensor], name: str, weight: Tensor, mixed: int | None, shape: tuple[int, ...]
) -> Tensor:
    """Check a weight and return it in the shape ``shape``.

    A matrix for one group of heads may come without the axis of groups. A convolution's weight may
    come with an axis of input channels, like the weights of torch's convolutions.

    Args:
        queries: the tensor of queries, of a batch or of packed documents, and its name.
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
        raise InputError(explain(f"{name}.dtype", weight.dtype, f"must be fp32 or the dtype of {q_name}", legal))
    heads = q.shape[1]
    if mixed and heads % mixed:
        _check_layout(queries, name, weight, mixed)
        check_groups(name, heads, mixed)
    if weight.shape == shape:
        return weight
    if not mixed and weight.shape == (heads, 1, *shape[1:]):
        return weight.squeeze(1)
    if mixed == heads and weight.shape == shape[1:]:
        return weight.unsqueeze(0)
    _check_layout(queries, name, weight, mixed)
    rule = (
        f"must be one (m, m) matrix per group of {mixed} heads"
        if mixed
        else "must be one (cq, ck) filter per query head"
    )
    others = f" or {shape[1:]}" if mixed == heads else "" if mixed else f" or {(heads, 1, *shape[1:])}"
    raise InputError(explain(f"{name}.shape", tuple(weight.shape), rule, f"{shape}{others}"))


def check_learned(
    arguments: Sequence[Argument],
    sizes: Mapping[str, int],
    q: Tensor,
    sink: Tensor | None,
    parameters: Mapping[str, Tensor] | None,
    factors: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """Check the factors of mixings, the sink and the parameters of expressions, and return them in order.

    Args:
        arguments: ``Spec.learned_arguments``, or those with packed documents.
        sizes: the value of each symbol in their shapes.
        q: the queries, for their device and dtype.
        sink: as it was passed.
        parameters: as they were passed.
        factors: those that were passed, by name.

    Raises:
        InputError: a tensor is missing, was not asked for, or has another shape, dtype or device.
    """
    if parameters is not None and not isinstance(parameters, (Mapping, torch.nn.ParameterDict)):
        raise InputError(explain("parameters", type(parameters).__name__, "must be a mapping", "{name: tensor}"))
    if q.shape[-2] > sizes.get("Nk", q.shape[-2]) and any(x.counts_pairs for x in arguments):
        rule = "a parameter of pairs of tokens has no entries for queries before the first key"
        raise InputError(explain("q.shape", tuple(q.shape), rule, "no more queries than keys"))
    given = {f"parameters[{name!r}]": x for name, x in (parameters or {}).items()}
    given |= ({} if sink is None else {SINK.name: sink}) | {**(factors or {})}
    described = {f"parameters[{x.name!r}]" if x.role == "parameters" else x.name: x for x in arguments}
    for name in given:
        if name not in described:
            rule = "this op was built without it"
            built = "None, or mtagen.build(..., sink=True), (..., parameters={...}) or (..., dynamic_ranks=...)"
            legal = ", ".join(described) or built
            raise InputError(explain(name, type(given[name]).__name__, rule, legal))
    checked = []
    for name, argument in described.items():
        shape = argument.extents(sizes)
        if name not in given:
            raise InputError(explain(name, None, "this op reads it, so each call needs it", f"shape {shape}"))
        x = given[name]
        check_dense(((name, x),))
        if tuple(x.shape) != shape:
            raise InputError(explain(f"{name}.shape", tuple(x.shape), f"must be {argument.shape}", shape))
        dtypes = {q.dtype if dtype == "q" else ARGUMENT_DTYPES[dtype] for dtype in argument.dtypes}
        if x.dtype not in dtypes:
            width = " of 32 bits" if argument.dtypes == CHECKED_INTEGERS else ""
            rule = (
                "must be fp32 or the dtype of q"
                if "q" in argument.dtypes
                else f"must be integers{width}, because visible reads it"
            )
            raise InputError(explain(f"{name}.dtype", x.dtype, rule, (*dtypes,)))
        if x.device != q.device:
            raise InputError(explain(f"{name}.device", x.device, "must be on q's device", q.device))
        entries = sizes["B"] if argument.shape[:1] == ("B",) else 1
        if argument.dtypes == CHECKED_INTEGERS and x.numel() >= 2**31 * entries:
            rule = "has more numbers than kernels count in 32 bits"
            raise InputError(explain(f"{name}.shape", shape, rule, "less than 2**31 for a batch entry"))
        checked.append(x)
    return checked
