"""Rows on their way from the ranks that hold them to those that need them, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_to_all_single

from .sharding import Rows, common


class Transfer(NamedTuple):
    """A transfer under way.

    Attributes:
        received: what it fills.
        sent: what it reads, which must live as long.
        work: what is waited for.
    """

    received: Tensor
    sent: Tensor
    work: Any

    def wait(self) -> Tensor:
        """What this rank received; on a GPU the current stream waits, not the CPU."""
        self.work.wait()
        return self.received


class Exchange:
    """One all-to-all, by which each rank gets the rows that it needs, in their order, from the ranks that hold them.

    Tensors have rows as their first axis. A transfer is begun by one method and waited for by another, so that what a
    rank computes meanwhile hides it. All ranks of the group call the same methods in the same order.

    Args:
        held: the chunks of rows of each rank, in the order in which its tensors hold them.
        needed: the rows that each rank needs.
        rank: this process's number among them.
    """

    def __init__(self, held: Sequence[Sequence[Rows]], needed: Sequence[Rows], rank: int) -> None:
        mine, wanted = held[rank], needed[rank]
        starts = list(accumulate((chunk.count for chunk in mine), initial=0))
        # By rank, the places of what is sent to it in the rows that this rank holds.
        self._sent = [
            [_place(common(chunk, rows), chunk.start - start) for start, chunk in zip(starts, mine, strict=False)]
            for rows in needed
        ]
        # By rank, the places of what comes from it in the rows that this rank needs.
        self._received = [[_place(common(chunk, wanted), wanted.start) for chunk in chunks] for chunks in held]

    def send(self, rows: Tensor, group: ProcessGroup) -> Transfer:
        """Begin to bring the rows that each rank holds to those that need them, for :meth:`receive`."""
        return _begin(rows, self._sent, self._received, group)

    def receive(self, transfer: Transfer) -> Tensor:
        """The rows that this rank needs."""
        places, received = _flat(self._received), transfer.wait()
        order = sorted(range(len(places)), key=lambda number: places[number].start)
        if order == list(range(len(places))):
            return received
        pieces = received.split_with_sizes([_length(place) for place in places])
        return torch.cat([pieces[number] for number in order])

    def send_back(self, grads: Tensor, group: ProcessGroup) -> Transfer:
        """Begin to bring the gradients of the rows that each rank needed to those that hold them, for :meth:`add`."""
        return _begin(grads, self._received, self._sent, group)

    def add(self, transfer: Transfer, grads: Tensor) -> None:
        """Add what came back to the gradients of the rows that this rank holds, in the order of ranks."""
        places = _flat(self._sent)
        pieces = transfer.wait().split_with_sizes([_length(place) for place in places])
        for place, piece in zip(places, pieces, strict=True):
            grads[place] += piece


def _begin(x: Tensor, sent: list[list[slice]], received: list[list[slice]], group: ProcessGroup) -> Transfer:
    output_sizes, input_sizes = ([sum(map(_length, places)) for places in each] for each in (received, sent))
    pieces = torch.cat([x[:0], *(x[place] for place in _flat(sent))]).contiguous()
    output = pieces.new_empty(sum(output_sizes), *pieces.shape[1:])
    work = all_to_all_single(output, pieces, output_sizes, input_sizes, group=group, async_op=True)
    return Transfer(output, pieces, work)


def _flat(places: list[list[slice]]) -> list[slice]:
    """Those that are not empty, of all ranks."""
    return [place for each in places for place in each if _length(place)]


def _length(place: slice) -> int:
    return int(place.stop - place.start)


def _place(rows: Rows, origin: int) -> slice:
    return slice(rows.start - origin, rows.stop - origin)
