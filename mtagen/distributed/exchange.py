"""Rows on their way from the ranks that hold them to those that need them, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, all_reduce, batch_isend_irecv, irecv, isend

from .sharding import Rows, common


@dataclass
class Transfer:
    """A transfer, which is under way once :func:`begin` has begun it.

    Attributes:
        sent: tensors, each with the rank that it is for; they must live as long.
        received: tensors that are filled, each with the rank that it comes from.
        works: what is waited for.
    """

    sent: list[tuple[int, Tensor]]
    received: list[tuple[int, Tensor]]
    works: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """On a GPU the current stream waits, not the CPU; with one of the transfers that began together, for all."""
        while self.works:
            self.works.pop().wait()


def begin(transfers: Sequence[Transfer], group: ProcessGroup, device: torch.device) -> None:
    """Begin transfers together. All ranks of the group do so, in the same order, even where they have nothing to do."""
    _connect(group, device)
    operations = [
        P2POp(operation, x, group=group, group_peer=rank)
        for transfer in transfers
        for operation, pieces in ((isend, transfer.sent), (irecv, transfer.received))
        for rank, x in pieces
    ]
    works = batch_isend_irecv(operations) if operations else []
    for transfer in transfers:
        transfer.works = works


_connected: WeakSet[ProcessGroup] = WeakSet()


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """NCCL connects ranks at a group's first operation, in which all must take part; transfers may leave some out."""
    if device.type == "cuda" and group not in _connected:
        all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


class Part(NamedTuple):
    """Rows of a chunk that this rank holds.

    Attributes:
        chunk: its number among this rank's.
        rows: a slice of it.
        x: what belongs there.
    """

    chunk: int
    rows: slice
    x: Tensor


class Exchange:
    """Brings to each rank what it needs of the rows that ranks hold, and gradients back.

    Rows come to where they are read, and are sent from where they are if they lie side by side. Tensors have rows as
    their first axis. A transfer is made by one method, begun with others by :func:`begin`, and waited for where it is
    used, so that what a rank computes meanwhile hides it. What a rank needs of its own rows is not sent.

    Args:
        held: the chunks of rows of each rank, in the order in which it holds them.
        needed: the rows that each rank needs.
        rank: this process's number among them.
        into: the rows of the tensor that what this rank needs is a part of; default that alone.
    """

    def __init__(
        self, held: Sequence[Sequence[Rows]], needed: Sequence[Rows], rank: int, into: Rows | None = None
    ) -> None:
        wanted = needed[rank]
        first = wanted.start if into is None else into.start
        # What others need of this rank's chunks, what it needs of theirs, and what it needs of its own.
        self._given = [
            (other, chunk, _slice(both, rows.start))
            for other, theirs in enumerate(needed)
            for chunk, rows in enumerate(held[rank])
            if other != rank and (both := common(rows, theirs)).count
        ]
        self._taken = [
            (other, _slice(both, first))
            for other, chunks in enumerate(held)
            for rows in chunks
            if other != rank and (both := common(rows, wanted)).count
        ]
        self._own = [
            (chunk, _slice(both, rows.start), _slice(both, first))
            for chunk, rows in enumerate(held[rank])
            if (both := common(rows, wanted)).count
        ]

    def send(self, chunks: Sequence[Tensor], result: Tensor) -> Transfer:
        """Rows of this rank's chunks, to those that need them; what it needs of other ranks' comes into ``result``."""
        sent = [(other, chunks[chunk][rows].contiguous()) for other, chunk, rows in self._given]
        return Transfer(sent, [(other, result[rows]) for other, rows in self._taken])

    def copy_own(self, chunks: Sequence[Tensor], result: Tensor) -> None:
        """What this rank needs of its own chunks."""
        for chunk, held, needed in self._own:
            result[needed] = chunks[chunk][held]

    def send_back(self, grads: Tensor) -> Transfer:
        """Gradients of what each rank needed, to those that hold it, for :meth:`returned`."""
        sizes = [(other, rows.stop - rows.start) for other, _, rows in self._given]
        received = [(other, grads.new_empty(size, *grads.shape[1:])) for other, size in sizes]
        return Transfer([(other, grads[rows].contiguous()) for other, rows in self._taken], received)

    def own(self, grads: Tensor) -> list[Part]:
        """What this rank's gradients are of its own chunks."""
        return [Part(chunk, held, grads[needed]) for chunk, held, needed in self._own]

    def returned(self, transfer: Transfer) -> list[Part]:
        """What came back to this rank's chunks, in the order of ranks."""
        transfer.wait()
        places = zip(self._given, transfer.received, strict=True)
        return [Part(chunk, rows, x) for (_, chunk, rows), (_, x) in places]


def total(parts: Sequence[Part], chunk: int, result: Tensor) -> None:
    """Fill the gradients of a chunk with the sums of what belongs there, which are taken in fp32 at least, in order."""
    for rows, terms in _terms(parts, chunk, [0, len(result)]):
        _add(terms, result[rows])


def combined(parts: Sequence[Part]) -> list[Part]:
    """The same gradients in parts of which no two have a row in common. Sums are of :func:`sum_dtype`.

    :func:`total` of these, and others after them, is what it is of the parts themselves and those others.
    """
    chunks = sorted({part.chunk for part in parts})
    every = [(chunk, rows, terms) for chunk in chunks for rows, terms in _terms(parts, chunk) if terms]
    return [Part(chunk, rows, terms[0] if len(terms) == 1 else _sum(terms)) for chunk, rows, terms in every]


def _terms(parts: Sequence[Part], chunk: int, ends: Sequence[int] = ()) -> Iterator[tuple[slice, list[Tensor]]]:
    """Slices of a chunk of whose rows each part has all or none, with what the parts have there."""
    mine = [part for part in parts if part.chunk == chunk]
    edges = sorted({*ends, *(edge for part in mine for edge in (part.rows.start, part.rows.stop))})
    for start, stop in pairwise(edges):
        yield (
            slice(start, stop),
            [
                part.x[start - part.rows.start : stop - part.rows.start]
                for part in mine
                if part.rows.start <= start and stop <= part.rows.stop
            ],
        )


def _add(terms: list[Tensor], result: Tensor) -> None:
    """Rounded once: an addition of two is computed in fp32 at least."""
    if not terms:
        result.zero_()
    elif len(terms) == 1:
        result.copy_(terms[0])
    else:
        *others, last = terms
        torch.add(others[0] if len(others) == 1 else _sum(others), last, out=result)


def _sum(terms: list[Tensor]) -> Tensor:
    """Of two or more, not rounded to their dtype."""
    first, second, *others = terms
    so_far = first.to(sum_dtype(first)) + second
    for term in others:
        so_far += term
    return so_far


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums of gradients are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


def _slice(rows: Rows, first: int) -> slice:
    """Where rows are in a tensor whose first row has that number."""
    return slice(rows.start - first, rows.stop - first)
