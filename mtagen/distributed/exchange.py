"""Rows on their way from the ranks that hold them to those that need them, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank


class Exchange:
    """One all-to-all: each rank gets the rows that it needs, in their order, from the ranks that hold them.

    Tensors have rows as their first axis. A transfer is begun by one method and waited for in another, so that what a
    rank computes meanwhile hides it. All ranks of the group call the same methods in the same order.

    Args:
        held: the chunks of rows of each rank, in the order in which its tensors hold them.
        needed: the rows that each rank needs.
        group: the ranks.
    """

    def __init__(self, held: Sequence[Sequence[range]], needed: Sequence[range], group: ProcessGroup) -> None:
        rank = get_rank(group)
        mine, wanted = held[rank], needed[rank]
        starts = list(accumulate(map(len, mine), initial=0))
        self._group = group
        # Places in the tensors that this rank holds, of what it sends to each rank.
        self._sent = [
            [_place(_common(chunk, rows), chunk.start - start) for start, chunk in zip(starts, mine, strict=False)]
            for rows in needed
        ]
        # Places in the tensors that this rank needs, of what it gets from each rank.
        self._received = [[_place(_common(chunk, wanted), wanted.start) for chunk in chunks] for chunks in held]

    def send(self, rows: Tensor) -> Tensor:
        """Begin to bring the rows of all ranks to where they are needed; what :meth:`receive` takes."""
        return self._transfer(rows, self._sent, self._received)

    def receive(self, transfer: Tensor) -> Tensor:
        """The rows that this rank needs."""
        pieces = zip(_flat(self._received), _split(transfer, self._received), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0].start)])

    def send_back(self, grads: Tensor) -> Tensor:
        """Begin to bring gradients of the rows that this rank needed to their owners; what :meth:`add` takes."""
        return self._transfer(grads, self._received, self._sent)

    def add(self, transfer: Tensor, grads: Tensor) -> None:
        """Add what all ranks sent back to the gradients of the rows that this rank holds, in the ranks' order."""
        for place, piece in zip(_flat(self._sent), _split(transfer, self._sent), strict=True):
            grads[place] += piece

    def _transfer(self, x: Tensor, sent: list[list[slice]], received: list[list[slice]]) -> Tensor:
        pieces = torch.cat([x[place] for place in _flat(sent)])
        sizes = [[sum(map(_length, places)) for places in each] for each in (received, sent)]
        return collectives.all_to_all_single(pieces.contiguous(), *sizes, self._group)


def _split(transfer: Tensor, places: list[list[slice]]) -> Sequence[Tensor]:
    return collectives.wait_tensor(transfer).split([_length(place) for place in _flat(places)])


def _flat(places: list[list[slice]]) -> list[slice]:
    return [place for each in places for place in each]


def _length(place: slice) -> int:
    return int(place.stop - place.start)


def _common(first: range, second: range) -> range:
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _place(rows: range, origin: int) -> slice:
    return slice(rows.start - origin, rows.stop - origin)
