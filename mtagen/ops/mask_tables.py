"""Compute the tables from which kernels read a mask that is no window: the first and the last key of each query.

Masks with the same enclosing window share kernels; the tables hold the rest, so parameters may
change without a rebuild. Kernels that check pairs also read the parameters of the condition.
"""

from __future__ import annotations

from typing import NamedTuple

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
        keys: number of keys of the sequence.
        begin: the sequence's first key among all keys of the row's axis.
    """

    entries: Tensor
    positions: Tensor
    keys: Tensor
    begin: Tensor


def of_call(spec: Spec, call: Call, pass_name: str) -> list[Tensor]:
    """Return the tables that kernels of a pass take, as :meth:`mtagen.Spec.tables` describes them, and then the
    parameters that kernels read, :attr:`mtagen.Spec.checked_arguments`.
    """
    if spec.visible is None:
        return []
    names = [table.name for table in spec.tables(pass_name)]
    rows = _rows_of_batch(call) if call.documents is None else _rows_of_documents(call)
    first, last = _limits(spec, call, rows)
    tables = {"first_keys": first, "last_keys": last}
    if "first_hidden" in names:
        tables["first_hidden"], tables["last_hidden"] = _gap(spec, call, rows, last)
    if "first_rows" in names:
        tables["first_rows"], tables["end_rows"] = _rows_of_keys(call, rows, first, last)
    if "first_hidden_rows" in names:
        hidden = tables["first_hidden"], tables["last_hidden"]
        tables["first_hidden_rows"], tables["end_hidden_rows"] = _rows_of_gaps(call, rows, *hidden)
    made = [tables[name].to(torch.int32).contiguous() for name in names]
    return [*(x.flatten() if call.documents is not None else x for x in made), *_checked(spec, call)]


def of_step(spec: Spec, step: Step) -> list[Tensor]:
    """Return the tables of the rows of a step of decoding, earlier queries first, ``(B, context + n_new)``."""
    if spec.visible is None:
        return []
    (batch, _, rows_of_step, _), capacity, device = step.q_tail.shape, step.k_cache.shape[2], step.q_tail.device
    keys = torch.full((batch, 1), capacity, device=device)
    if step.cache_seqlens is not None:
        keys = step.cache_seqlens.clamp(0, capacity).to(torch.int64)[:, None]
    positions = keys - rows_of_step + torch.arange(rows_of_step, device=device)
    entries = torch.arange(batch, device=device)[:, None]
    rows = _Rows(entries.expand_as(positions), positions, keys.expand_as(positions), torch.zeros_like(positions))
    first, last = _limits(spec, step, rows)
    tables = first, torch.where(positions < 0, UNSEEING[1], last)
    return [*(x.to(torch.int32).contiguous() for x in tables), *_checked(spec, step)]


def _rows_of_batch(call: Call) -> _Rows:
    (batch, _, nq, _), nk, device = call.q.shape, call.k.shape[2], call.q.device
    positions = torch.arange(nk - nq, nk, device=device).expand(batch, nq)
    entries = torch.arange(batch, device=device)[:, None].expand(batch, nq)
    return _Rows(entries, positions, torch.full_like(positions, nk), torch.zeros_like(positions))


def _rows_of_documents(call: Call) -> _Rows:
    """Padding rows get the last document's number and no keys."""
    assert call.documents is not None, "the call is one of packed documents"
    begin_q, begin_k = (cu_seq.to(torch.int64) for cu_seq in call.documents[:2])
    row = torch.arange(len(call.q), device=call.q.device)
    document = document_of(begin_q, row)
    keys = begin_k.diff()[document]
    positions = row - begin_q[document] + keys - begin_q.diff()[document]
    exists = row < begin_q[-1]
    return _Rows(*(x[None] for x in (document, positions, torch.where(exists, keys, 0), begin_k[document])))


def _limits(spec: Spec, call: Call | Step, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Return the first and the last key of each row, counted in its sequence."""
    first, last = _bounds(spec, call).keys(rows.positions, rows.entries)
    first = torch.zeros_like(rows.positions) if first is None else first.expand_as(rows.positions).clamp(min=0)
    last = rows.keys - 1 if last is None else torch.minimum(last, rows.keys - 1)
    if spec.left is not None:
        first = torch.maximum(first, rows.positions - spec.left)
    if spec.right is not None:
        last = torch.minimum(last, rows.positions + spec.right)
    sees = first <= last
    return torch.where(sees, first, UNSEEING[0]), torch.where(sees, last, UNSEEING[1])


def _bounds(spec: Spec, call: Call | Step) -> Bounds:
    arguments = zip(spec.learned_arguments, call.learned, strict=True)
    return Bounds(spec, {argument.name: x for argument, x in arguments})


def _checked(spec: Spec, call: Call | Step) -> list[Tensor]:
    """Return the parameters that kernels read to check pairs."""
    arguments = zip(spec.learned_arguments, call.learned, strict=True)
    return [x.contiguous() for argument, x in arguments if argument.name in spec.checked_parameters]


def _gap(spec: Spec, call: Call, rows: _Rows, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last key of each row's gap, counted in its sequence; 0 and -1 where there is none.

    All keys are in the gap of a row that sees none.
    """
    first_hidden, last_hidden = _bounds(spec, call).gap(rows.positions, rows.entries)
    last_hidden = torch.minimum(last_hidden, rows.keys - 1)
    is_gap, sees = first_hidden <= last_hidden, last >= 0
    first_hidden = torch.where(is_gap & sees, first_hidden, 0)
    return first_hidden, torch.where(sees, torch.where(is_gap, last_hidden, -1), UNSEEING[0])


def _rows_of_gaps(call: Call, rows: _Rows, first_hidden: Tensor, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each key, the first row of its sequence from which on all rows have it or a later key in their gaps,
    and the end of the rows that all have it or an earlier key there.

    All rows between have the key in their gaps. Keys and rows of all sequences of an axis are numbered
    consecutively, as in :func:`_rows_of_keys`.
    """
    return _searched(call, _least_from(last_hidden + rows.begin), (first_hidden + rows.begin).cummax(-1).values)


def _rows_of_keys(call: Call, rows: _Rows, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each key, the first row of its sequence that sees it or a later key, and the end of the rows that
    see it or an earlier key.

    Keys of all sequences of an axis are numbered consecutively, so that one search serves packed documents.
    """
    sees = last >= 0
    latest = torch.where(sees, last + rows.begin, -1).cummax(-1).values
    firsts = torch.where(sees, first + rows.begin, 2 * UNSEEING[0])
    return _searched(call, latest, _least_from(firsts))


def _least_from(numbers: Tensor) -> Tensor:
    """Return, for each row, the least number of it and all later rows."""
    return numbers.flip(-1).cummin(-1).values.flip(-1)


def _searched(call: Call, latest: Tensor, earliest: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each key, the first row of its sequence whose number in ``latest`` is not before the key, and the end
    of the rows whose number in ``earliest`` is not after it. The numbers of rows do not fall.
    """
    documents, device = call.documents, latest.device
    if documents is None:
        keys = torch.arange(call.k.shape[2], device=device).expand(len(latest), -1).contiguous()
        first_row = torch.searchsorted(latest.contiguous(), keys)
        return first_row, torch.searchsorted(earliest.contiguous(), keys, right=True)
    begin_q, begin_k = (cu_seq.to(torch.int64) for cu_seq in documents[:2])
    keys = torch.arange(len(call.k), device=device)
    document = document_of(begin_k, keys)
    first_row = torch.searchsorted(latest[0].contiguous(), keys) - begin_q[document]
    end_row = torch.searchsorted(earliest[0].contiguous(), keys, right=True) - begin_q[document]
    lengths = begin_q.diff()[document]
    return torch.minimum(first_row.clamp(min=0), lengths), torch.minimum(end_row.clamp(min=0), lengths)
