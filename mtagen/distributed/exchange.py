"""Rows on their way from the ranks that hold them to those that need them, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, all_reduce, batch_isend_irecv, irecv, isend

from .sharding import Rows, common


@dataclass
class Transfer:
    """A transfer, which is under way once :func:`begin` has begun it.

    Attributes:
        rows: what this rank has of it; must live as long.
        sent: parts of them, each with the rank that it is for.
        received: what is filled, each with the rank that it comes from.
        own: what this rank itself has, behind the place that it is copied to.
        result: where rows that come are parts of a tensor, that tensor.
        works: what is waited for.
    """

    rows: Tensor
    sent: list[tuple[int, Tensor]]
    received: list[tuple[int, Tensor]]
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    result: Tensor | None = None
    works: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """On a GPU the current stream waits, not the CPU; with one of the transfers that began together, for all."""
        while self.works:
            self.works.pop().wait()


def begin(transfers: Sequence[Transfer], group: ProcessGroup) -> None:
    """Begin transfers together, and copy the rank's own rows meanwhile. All ranks do so, in the same order."""
    _connect(group, transfers[0].rows.device)
    operations = [
        P2POp(operation, x, group=group, group_peer=rank)
        for transfer in transfers
        for operation, pieces in ((isend, transfer.sent), (irecv, transfer.received))
        for rank, x in pieces
    ]
    works = batch_isend_irecv(operations) if operations else []
    for transfer in transfers:
        transfer.works = works
        for place, rows in transfer.own:
            place.copy_(rows)


@cache
def _connect(group: ProcessGroup, device: torch.device) -> None:
    """NCCL connects ranks at a group's first operation, in which all must take part; transfers may leave some out."""
    all_reduce(torch.zeros(1, device=device), group=group)


class _Place(NamedTuple):
    """Rows that go to a rank, or come from it.

    Attributes:
        rank: its number, which may be this process's own.
        rows: a slice of a tensor's first axis.
    """

    rank: int
    rows: slice


class Exchange:
    """What each rank needs of the rows that ranks hold, brought to its place without copies before or after.

    Tensors have rows as their first axis. A transfer is made by one method, begun with others by :func:`begin`, and
    waited for by another method, so that what a rank computes meanwhile hides it. A rank's own rows are not sent.

    Args:
        held: the chunks of rows of each rank, in the order in which its tensors hold them.
        needed: the rows that each rank needs.
        rank: this process's number among them.
    """

    def __init__(self, held: Sequence[Sequence[Rows]], needed: Sequence[Rows], rank: int) -> None:
        mine, wanted = held[rank], needed[rank]
        starts = list(accumulate((chunk.count for chunk in mine), initial=0))
        self._rank, self._count = rank, wanted.count
        # In the rows that this rank holds, what each rank needs of them.
        self._held = _places(
            (other, common(chunk, rows), chunk.start - start)
            for other, rows in enumerate(needed)
            for start, chunk in zip(starts, mine, strict=False)
        )
        # In the rows that this rank needs, what each rank holds of them.
        self._needed = _places(
            (other, common(chunk, wanted), wanted.start) for other, chunks in enumerate(held) for chunk in chunks
        )
        own = [[place.rows for place in places if place.rank == rank] for places in (self._held, self._needed)]
        self._own = list(zip(*own, strict=True))

    def send(self, rows: Tensor) -> Transfer:
        """Rows that each rank holds, to those that need them, for :meth:`receive`."""
        result = rows.new_empty(self._count, *rows.shape[1:])
        own = [(result[needed], rows[held]) for held, needed in self._own]
        return Transfer(rows, self._pieces(rows, self._held), self._pieces(result, self._needed), own, result)

    def receive(self, transfer: Transfer) -> Tensor:
        """The rows that this rank needs, once they are there."""
        assert transfer.result is not None
        transfer.wait()
        return transfer.result

    def send_back(self, grads: Tensor) -> Transfer:
        """Gradients of the rows that each rank needed, to those that hold them, who add their own and the others'."""
        received = [
            (place.rank, grads.new_empty(place.rows.stop - place.rows.start, *grads.shape[1:]))
            for place in self._held
            if place.rank != self._rank
        ]
        return Transfer(grads, self._pieces(grads, self._needed), received)

    def add_own(self, transfer: Transfer, grads: Tensor) -> None:
        """Add what this rank itself gives, without waiting, to the gradients of the rows that it holds."""
        for held, needed in self._own:
            grads[held] += transfer.rows[needed]

    def add_others(self, transfer: Transfer, grads: Tensor) -> None:
        """Add what came from the other ranks, in their order, to the gradients of the rows that this rank holds."""
        transfer.wait()
        places = (place.rows for place in self._held if place.rank != self._rank)
        for held, (_, piece) in zip(places, transfer.received, strict=True):
            grads[held] += piece

    def _pieces(self, x: Tensor, places: list[_Place]) -> list[tuple[int, Tensor]]:
        """What goes to other ranks or comes from them."""
        return [(place.rank, x[place.rows].contiguous()) for place in places if place.rank != self._rank]


def _places(found: Iterable[tuple[int, Rows, int]]) -> list[_Place]:
    """Those that are not empty, by ranks, rows and the row's number that a tensor begins with."""
    return [_Place(rank, slice(rows.start - first, rows.stop - first)) for rank, rows, first in found if rows.count]
