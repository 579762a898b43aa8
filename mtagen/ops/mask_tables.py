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
        keys: number of keys of the sequence.
        begin: the sequence's first key among all keys of the row's axis.
    """

    entries: Tensor
    positions: Tensor
    keys: Tensor
    begin: Tensor


def of_call(spec: Spec, call: Call, pass_name: str) -> list[Tensor]:
    """Return the tables that kernels of a pass take, as :meth:`mtagen.Spec.tables` describes them."""
    if spec.visible is None:
        return []
    rows = _rows_of_batch(call) if call.documents is None else _rows_of_documents(call)
    first, last = _limits(spec, call, rows)
    tables = [first, last]
    if len(spec.tables(pass_name)) > len(tables):
        tables += _rows_of_keys(call, rows, first, last)
    return [x.flatten() if call.documents is not None else x for x in (x.to(torch.int32).contiguous() for x in tables)]


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
    rows = _Rows(entries.expand_as(positions), positions, keys.expand_as(positions), torch.zeros_like(positions))
    first, last = _limits(spec, step, rows)
    return [x.to(torch.int32).contiguous() for x in (first, torch.where(positions < 0, UNSEEING[1], last))]


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
    arguments = zip(spec.learned_arguments, call.learned, strict=True)
    bounds = Bounds(spec, {argument.name: x for argument, x in arguments})
    first, last = bounds.keys(rows.positions, rows.entries)
    first = torch.zeros_like(rows.positions) if first is None else first.expand_as(rows.positions).clamp(min=0)
    last = rows.keys - 1 if last is None else torch.minimum(last, rows.keys - 1)
    if spec.left is not None:
        first = torch.maximum(first, rows.positions - spec.left)
    if spec.right is not None:
        last = torch.minimum(last, rows.positions + spec.right)
    sees = first <= last
    return torch.where(sees, first, UNSEEING[0]), torch.where(sees, last, UNSEEING[1])


def _rows_of_keys(call: Call, rows: _Rows, first: Tensor, last: Tensor) -> list[Tensor]:
    """Return, for each key, the first row of its sequence that sees it or a later key, and the end of the rows that
    see it or an earlier key.

    Keys of all sequences of an axis are numbered consecutively, so that one search serves packed documents.
    """
    sees = last >= 0
    latest = torch.where(sees, last + rows.begin, -1).cummax(-1).values
    firsts = torch.where(sees, first + rows.begin, 2 * UNSEEING[0])
    earliest = firsts.flip(-1).cummin(-1).values.flip(-1)
    documents = call.documents
    if documents is None:
        keys = torch.arange(call.k.shape[2], device=first.device).expand(len(first), -1).contiguous()
        return [
            torch.searchsorted(latest, keys),
            torch.searchsorted(earliest.contiguous(), keys, right=True),
        ]
    begin_q, begin_k = (cu_seq.to(torch.int64) for cu_seq in documents[:2])
    keys = torch.arange(len(call.k), device=first.device)
    document = document_of(begin_k, keys)
    first_row = torch.searchsorted(latest[0], keys) - begin_q[document]
    end_row = torch.searchsorted(earliest[0].contiguous(), keys, right=True) - begin_q[document]
    lengths = begin_q.diff()[document]
    return [torch.minimum(x.clamp(min=0), lengths) for x in (first_row, end_row)]
