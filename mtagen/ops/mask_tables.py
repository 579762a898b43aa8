"""Compute the tables from which kernels read a mask that is no window: the first and the last key of each query.

Masks with the same enclosing window share kernels; the tables hold the rest, so parameters may
change without a rebuild.
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
        keys: number of keys of the sequence; an int if all have as many.
    """

    entries: Tensor
    positions: Tensor
    keys: Tensor | int


def of_call(spec: Spec, call: Call, pass_name: str) -> list[Tensor]:
    """Return the tables that kernels of a pass take, as :meth:`mtagen.Spec.tables` describes them."""
    if spec.visible is None:
        return []
    rows = _rows_of_batch(call) if call.documents is None else _rows_of_documents(call)
    first, last = _limits(spec, call, rows)
    tables, of_keys = [first, last], len(spec.tables(pass_name)) > 2
    if call.documents is None:
        return tables + (_rows_of_keys(first, last, call.k.shape[2]) if of_keys else [])
    return [x.flatten() for x in tables + (_rows_of_packed_keys(first, last, call) if of_keys else [])]


def of_step(spec: Spec, step: Step) -> list[Tensor]:
    """Return the tables of the rows of a step of decoding, earlier queries first, ``(B, context + n_new)``."""
    if spec.visible is None:
        return []
    (batch, _, rows_of_step, _), capacity, device = step.q_tail.shape, step.capacity, step.q_tail.device
    keys = torch.full((batch, 1), capacity, device=device)
    if step.cache_seqlens is not None:
        keys = step.cache_seqlens.clamp(0, capacity).to(torch.int64)[:, None]
    positions = keys - rows_of_step + torch.arange(rows_of_step, device=device)
    entries = torch.arange(batch, device=device)[:, None]
    rows = _Rows(entries.expand_as(positions), positions, keys.expand_as(positions))
    first, last = _limits(spec, step, rows)
    return [first, last.masked_fill_(positions < 0, UNSEEING[1])]


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
    arguments = zip(spec.learned_arguments, call.learned, strict=True)
    bounds = Bounds(spec, {argument.name: x for argument, x in arguments})
    first, last = bounds.keys(positions, rows.entries)
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


def _rows_of_keys(first: Tensor, last: Tensor, n_k: int) -> list[Tensor]:
    """Return, for each of the keys ``0 .. n_k - 1``, the first row that sees it or a later key, and the end of the
    rows that see it or an earlier key.

    Args:
        first, last: the first and the last key of each row, int32 ``(B, rows)``.
    """
    keys = torch.arange(n_k, dtype=torch.int32, device=first.device).expand(len(first), -1).contiguous()
    latest = last.cummax(-1).values
    earliest = first.flip(-1).cummin(-1).values.flip(-1)
    return [
        torch.searchsorted(latest, keys, out_int32=True),
        torch.searchsorted(earliest, keys, right=True, out_int32=True),
    ]


def _rows_of_packed_keys(first: Tensor, last: Tensor, call: Call) -> list[Tensor]:
    """Return the same for each key of packed documents, with rows counted in its document.

    Keys of all documents are numbered consecutively, so that one search serves all.
    """
    assert call.documents is not None, "the call is one of packed documents"
    begin_q, begin_k = call.documents[:2]
    begin = begin_k[document_of(begin_q, torch.arange(len(call.q), dtype=torch.int32, device=first.device))]
    sees_none = last < 0
    first, last = (first + begin).masked_fill_(sees_none, UNSEEING[0]), (last + begin).masked_fill_(sees_none, -1)
    document = document_of(begin_k, torch.arange(len(call.k), dtype=torch.int32, device=first.device))
    before, lengths = begin_q[document], begin_q.diff()[document]
    return [torch.minimum((x - before).clamp(min=0), lengths) for x in _rows_of_keys(first, last, len(call.k))]
