"""Compute the tables from which kernels read a mask that is no window: the first and the last key of each query.

Masks with the same enclosing window share kernels; the tables hold the rest, so parameters may
change without a rebuild. Kernels that check pairs also read the parameters of the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..call import Call, Step, document_of
from ..evaluate import Bounds
from ..spec import UNSEEING, Spec


class _Rows(NamedTuple):
    """Rows of sequences, int64 of equal shapes, ``(B, Nq)`` or ``(1, total_q)``.

    Attributes:
        entries: the batch entry or document.
        positions: the position in the sequence.
        keys: number of keys of the sequence; an int if all have as many.
    """

    entries: Tensor
    positions: Tensor
    keys: Tensor | int


Functions: TypeAlias = Mapping[str, Callable[..., Sequence[Tensor]]]  # generated, by pass


def of_call(spec: Spec, call: Call, pass_name: str, generated: Functions = MappingProxyType({})) -> list[Tensor]:
    """Return the tables that kernels of a pass take, as :meth:`mtagen.Spec.tables` describes them, and then the
    parameters that kernels read, :attr:`mtagen.Spec.checked_arguments`.

    Args:
        spec: the operator.
        call: the call.
        pass_name: the pass.
        generated: functions that compute the tables by one or two kernels. Without the pass's function many
            operations of PyTorch compute the same tables.
    """
    if spec.visible is None:
        return []
    if function := generated.get(pass_name):
        n_k = call.k.shape[2] if call.documents is None else len(call.k)
        boundaries = () if call.documents is None else (x.contiguous() for x in call.documents[:2])
        return [*function(call.q, *_read(spec, call), *boundaries, n_k), *_checked(spec, call)]
    names = [table.name for table in spec.tables(pass_name)]
    rows = _rows_of_batch(call) if call.documents is None else _rows_of_documents(call)
    first, last = _limits(spec, call, rows)
    tables = {"first_keys": first, "last_keys": last}
    if "first_hidden" in names:
        tables["first_hidden"], tables["last_hidden"] = _gap(spec, call, rows, last)
    if "first_rows" in names:
        tables["first_rows"], tables["end_rows"] = _rows_of_keys(call, first, last)
    if "first_hidden_rows" in names:
        hidden = tables["first_hidden"], tables["last_hidden"]
        tables["first_hidden_rows"], tables["end_hidden_rows"] = _rows_of_gaps(call, *hidden)
    made = [tables[name] for name in names]
    return [*(made if call.documents is None else (x.flatten() for x in made)), *_checked(spec, call)]


def of_step(spec: Spec, step: Step, generated: Functions = MappingProxyType({})) -> list[Tensor]:
    """Return the tables of the rows of a step of decoding, earlier queries first, ``(B, context + n_new)``.

    The arguments are those of :func:`of_call`.
    """
    if spec.visible is None:
        return []
    if function := generated.get("decode"):
        lengths = None if step.cache_seqlens is None else step.cache_seqlens.contiguous()
        return [*function(step.q_tail, *_read(spec, step), lengths, step.capacity), *_checked(spec, step)]
    (batch, _, rows_of_step, _), capacity, device = step.q_tail.shape, step.capacity, step.q_tail.device
    keys = torch.full((batch, 1), capacity, device=device)
    if step.cache_seqlens is not None:
        keys = step.cache_seqlens.clamp(0, capacity).to(torch.int64)[:, None]
    positions = keys - rows_of_step + torch.arange(rows_of_step, device=device)
    entries = torch.arange(batch, device=device)[:, None]
    rows = _Rows(entries.expand_as(positions), positions, keys.expand_as(positions))
    first, last = _limits(spec, step, rows)
    return [first, last.masked_fill_(positions < 0, UNSEEING[1]), *_checked(spec, step)]


def _rows_of_batch(call: Call) -> _Rows:
    (batch, _, nq, _), nk, device = call.q.shape, call.k.shape[2], call.q.device
    positions = torch.arange(nk - nq, nk, device=device).expand(batch, nq)
    entries = torch.arange(batch, device=device)[:, None].expand(batch, nq)
    return _Rows(entries, positions, nk)


def _rows_of_documents(call: Call) -> _Rows:
    """Padding rows get the last document's number and no keys."""
    assert call.documents is not None, "the call is one of packed documents"
    begin_q, begin_k = (cu_seq.to(torch.int64) for cu_seq in call.documents[:2])
    row = torch.arange(len(call.q), device=call.q.device)
    document = document_of(begin_q, row)
    keys = begin_k.diff()[document]
    positions = row - begin_q[document] + keys - begin_q.diff()[document]
    exists = row < begin_q[-1]
    return _Rows(*(x[None] for x in (document, positions, torch.where(exists, keys, 0))))


def _limits(spec: Spec, call: Call | Step, rows: _Rows) -> list[Tensor]:
    """Return the first and the last key of each row, counted in its sequence, int32 and contiguous."""
    positions = rows.positions
    first, last = _bounds(spec, call).keys(positions, rows.entries)
    if spec.left is not None:
        in_window = positions - spec.left
        first = in_window if first is None else torch.maximum(first, in_window)
    if spec.right is not None:
        in_window = positions + spec.right if spec.right else positions
        last = in_window if last is None else torch.minimum(last, in_window)
    first = torch.zeros_like(positions) if first is None else first.clamp(min=0)
    if isinstance(rows.keys, int):
        last = positions.new_full((), rows.keys - 1) if last is None else last.clamp(max=rows.keys - 1)
    else:
        last = rows.keys - 1 if last is None else torch.minimum(last, rows.keys - 1)
    sees_none = first > last  # before int32, which has no room for all integers of parameters
    tables = (x.expand_as(positions).to(torch.int32).contiguous() for x in (first, last))
    return [x.masked_fill_(sees_none, unseeing) for x, unseeing in zip(tables, UNSEEING, strict=True)]


def _bounds(spec: Spec, call: Call | Step) -> Bounds:
    arguments = zip(spec.learned_arguments, call.learned, strict=True)
    return Bounds(spec, {argument.name: x for argument, x in arguments})


def _checked(spec: Spec, call: Call | Step) -> list[Tensor]:
    """Return the parameters that kernels read to check pairs."""
    return _named(spec, call, spec.checked_parameters)


def _read(spec: Spec, call: Call | Step) -> list[Tensor]:
    """Return the parameters from which generated functions compute the tables."""
    return _named(spec, call, spec.table_parameters)


def _named(spec: Spec, call: Call | Step, names: Collection[str]) -> list[Tensor]:
    arguments = zip(spec.learned_arguments, call.learned, strict=True)
    return [x.contiguous() for argument, x in arguments if argument.name in names]


def _gap(spec: Spec, call: Call, rows: _Rows, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last key of each row's gap, counted in its sequence, int32; 0 and -1 where it has none.

    All keys are in the gap of a row that sees none.
    """
    first_hidden, last_hidden = _bounds(spec, call).gap(rows.positions, rows.entries)
    last_hidden = torch.minimum(last_hidden, torch.as_tensor(rows.keys - 1, device=last.device))
    is_gap, sees = first_hidden <= last_hidden, last >= 0
    first_hidden = torch.where(is_gap & sees, first_hidden, 0)
    last_hidden = torch.where(sees, torch.where(is_gap, last_hidden, -1), UNSEEING[0])
    return first_hidden.to(torch.int32), last_hidden.to(torch.int32)


def _rows_of_keys(call: Call, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each key, the first row of its sequence that sees it or a later key, and the end of the rows that
    see it or an earlier key.

    Args:
        call: the call.
        first, last: the first and the last key of each row, int32 ``(B, rows)``.
    """
    begin = _begin_of_keys(call)
    if begin is not None:
        sees_none = last < 0
        first, last = (first + begin).masked_fill_(sees_none, UNSEEING[0]), (last + begin).masked_fill_(sees_none, -1)
    return _searched(call, last.cummax(-1).values, _least_from(first))


def _rows_of_gaps(call: Call, first_hidden: Tensor, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each key, the first row of its sequence from which on all rows have it or a later key in their gaps,
    and the end of the rows that all have it or an earlier key there.

    All rows between have the key in their gaps.
    """
    begin = _begin_of_keys(call)
    if begin is not None:
        first_hidden, last_hidden = first_hidden + begin, last_hidden + begin
    return _searched(call, _least_from(last_hidden), first_hidden.cummax(-1).values)


def _begin_of_keys(call: Call) -> Tensor | None:
    """Return the first key of each row's document, by which keys of all documents are numbered consecutively; one
    search then serves all. None for a batch.
    """
    if call.documents is None:
        return None
    begin_q, begin_k = call.documents[:2]
    return begin_k[document_of(begin_q, torch.arange(len(call.q), dtype=torch.int32, device=call.q.device))]


def _least_from(numbers: Tensor) -> Tensor:
    """Return, for each row, the least number of it and all later rows."""
    return numbers.flip(-1).cummin(-1).values.flip(-1)


def _searched(call: Call, latest: Tensor, earliest: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each key, the first row of its sequence whose number in ``latest`` is not before the key, and the end
    of the rows whose number in ``earliest`` is not after it, int32. The numbers of rows do not fall.
    """
    documents, device = call.documents, latest.device
    n_k = call.k.shape[2] if documents is None else len(call.k)
    keys = torch.arange(n_k, dtype=torch.int32, device=device)
    all_keys = keys.expand(len(latest), -1).contiguous()
    first_row = torch.searchsorted(latest, all_keys, out_int32=True)
    end_row = torch.searchsorted(earliest, all_keys, right=True, out_int32=True)
    if documents is None:
        return first_row, end_row
    begin_q, begin_k = documents[:2]
    document = document_of(begin_k, keys)
    before, lengths = begin_q[document], begin_q.diff()[document]
    first_row, end_row = (torch.minimum((x - before).clamp(min=0), lengths) for x in (first_row, end_row))
    return first_row, end_row
