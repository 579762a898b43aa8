"""Exchange of rows between the ranks that hold them and the ranks that need them, and of gradients
in return.
"""

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
    """A transfer, which :func:`begin` starts.

    Attributes:
        sent: tensors to send, each with its receiver's rank; they must live until the transfer has
            ended.
        received: tensors to fill, each with its sender's rank.
        works: handles of the operations that :meth:`wait` waits for.
    """

    sent: list[tuple[int, Tensor]]
    received: list[tuple[int, Tensor]]
    works: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for this transfer and all that began with it; on a GPU the current stream waits, not
        the CPU.
        """
        while self.works:
            self.works.pop().wait()


def begin(transfers: Sequence[Transfer], group: ProcessGroup, device: torch.device) -> None:
    """Begin transfers together.

    All ranks of the group must do so, in the same order, even with nothing to transfer.
    """
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
    """Make NCCL connect the ranks: it does so in a group's first operation, in which all ranks must
    take part.

    A transfer may involve only some ranks.
    """
    if device.type == "cuda" and group not in _connected:
        all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


class Part(NamedTuple):
    """Gradients of some rows of a chunk that this rank holds.

    Attributes:
        chunk: number of the chunk on this rank.
        rows: slice of the chunk.
        x: gradients of these rows.
    """

    chunk: int
    rows: slice
    x: Tensor


class Exchange:
    """An exchange that sends to each rank the rows that it needs from others, and returns
    gradients.

    Rows arrive where they are read, and contiguous rows are sent without a copy. Tensors have rows
    as their first axis. A method returns a transfer, :func:`begin` begins it together with others,
    and the caller waits for it before its use, so that computation in between hides it. A rank's
    own rows are not sent.

    Args:
        held: the chunks of rows of each rank, in the order in which it holds them.
        needed: the rows that each rank needs.
        rank: this process's number among them.
        into: rows of the tensor that receives this rank's needed rows, and includes them; default:
            these rows only.
    """

    def __init__(
        self, held: Sequence[Sequence[Rows]], needed: Sequence[Rows], rank: int, into: Rows | None = None
    ) -> None:
        needed_here = needed[rank]
        first = needed_here.start if into is None else into.start
        # Rows of this rank's chunks that others need, of their chunks that this rank needs, and of its own.
        self._sent = [
            (other, chunk, _slice(both, rows.start))
            for other, theirs in enumerate(needed)
            for chunk, rows in enumerate(held[rank])
            if other != rank and (both := common(rows, theirs)).count
        ]
        self._received = [
            (other, _slice(both, first))
            for other, chunks in enumerate(held)
            for rows in chunks
            if other != rank and (both := common(rows, needed_here)).count
        ]
        self._local = [
            (chunk, _slice(both, rows.start), _slice(both, first))
            for chunk, rows in enumerate(held[rank])
            if (both := common(rows, needed_here)).count
        ]

    def send(self, chunks: Sequence[Tensor], result: Tensor) -> Transfer:
        """Return the transfer of this rank's rows to other ranks, and of other ranks' rows into
        ``result``.
        """
        sent = [(other, chunks[chunk][rows].contiguous()) for other, chunk, rows in self._sent]
        return Transfer(sent, [(other, result[rows]) for other, rows in self._received])

    def copy_own(self, chunks: Sequence[Tensor], result: Tensor) -> None:
        """Copy the rows that this rank needs from its own chunks."""
        for chunk, held, needed in self._local:
            result[needed] = chunks[chunk][held]

    def send_back(self, grads: Tensor) -> Transfer:
        """Return the transfer of gradients of needed rows to the ranks that hold the rows, for
        :meth:`returned`.
        """
        sizes = [(other, rows.stop - rows.start) for other, _, rows in self._sent]
        received = [(other, grads.new_empty(size, *grads.shape[1:])) for other, size in sizes]
        return Transfer([(other, grads[rows].contiguous()) for other, rows in self._received], received)

    def local(self, grads: Tensor) -> list[Part]:
        """Return the part of this rank's gradients that belongs to its own chunks."""
        return [Part(chunk, held, grads[needed]) for chunk, held, needed in self._local]

    def returned(self, transfer: Transfer) -> list[Part]:
        """Wait for the gradients of this rank's chunks from the other ranks, and return them in the
        order of ranks.
        """
        transfer.wait()
        both = zip(self._sent, transfer.received, strict=True)
        return [Part(chunk, rows, x) for (_, chunk, rows), (_, x) in both]


def total(parts: Sequence[Part], chunk: int, result: Tensor) -> None:
    """Fill the gradients of a chunk with the sums of its parts, in order; sums are in fp32 at
    least.
    """
    for rows, terms in _terms(parts, chunk, [0, len(result)]):
        _add(terms, result[rows])


def combined(parts: Sequence[Part]) -> list[Part]:
    """Return the same gradients in parts without common rows. Sums have :func:`sum_dtype`.

    :func:`total` gives the same result for these parts, followed by others, as for the original
    parts and the others.
    """
    chunks = sorted({part.chunk for part in parts})
    by_rows = [(chunk, rows, terms) for chunk in chunks for rows, terms in _terms(parts, chunk) if terms]
    return [Part(chunk, rows, terms[0] if len(terms) == 1 else _sum(terms)) for chunk, rows, terms in by_rows]


def _terms(parts: Sequence[Part], chunk: int, ends: Sequence[int] = ()) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield slices of a chunk, each with the terms of its sum.

    A part has either all rows of a slice or none.
    """
    of_chunk = [part for part in parts if part.chunk == chunk]
    edges = sorted({*ends, *(edge for part in of_chunk for edge in (part.rows.start, part.rows.stop))})
    for start, stop in pairwise(edges):
        yield (
            slice(start, stop),
            [
                part.x[start - part.rows.start : stop - part.rows.start]
                for part in of_chunk
                if part.rows.start <= start and stop <= part.rows.stop
            ],
        )


def _add(terms: list[Tensor], result: Tensor) -> None:
    """Write the sum of some terms to ``result``, rounded once: an addition of two is computed in
    fp32 at least.
    """
    if not terms:
        result.zero_()
    elif len(terms) == 1:
        result.copy_(terms[0])
    else:
        *others, last = terms
        torch.add(others[0] if len(others) == 1 else _sum(others), last, out=result)


def _sum(terms: list[Tensor]) -> Tensor:
    """Return the sum of two or more terms, not rounded to their dtype."""
    first, second, *others = terms
    so_far = first.to(sum_dtype(first)) + second
    for term in others:
        so_far += term
    return so_far


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums of gradients."""
    return torch.promote_types(x.dtype, torch.float32)


def _slice(rows: Rows, first: int) -> slice:
    """Return the slice of rows in a tensor that starts with row ``first``."""
    return slice(rows.start - first, rows.stop - first)
