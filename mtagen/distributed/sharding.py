"""Arithmetic on row numbers: the rows of a sequence that each rank holds, and the other rows that
it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..spec import Spec


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a sequence.

    Attributes:
        start: number of the first row; like ``stop`` maybe a symbol of ``torch.compile``, which
            ``range`` cannot hold.
        stop: number of the last row, plus one.
    """

    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


@dataclass(frozen=True)
class Sharding:
    """A sequence cut into chunks, which ranks hold.

    Chunks have the same length, or the first chunks are one row longer, as in
    ``torch.tensor_split``; a short sequence has empty chunks.

    Attributes:
        length: rows of the sequence.
        ranks: W.
        balanced: if true, there are 2W chunks, and rank r holds chunks r and 2W-1-r: in causal
            attention, whose later rows see more keys, all ranks then have the same work. If false,
            there are W chunks, and rank r holds chunk r.
    """

    length: int
    ranks: int
    balanced: bool

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return 2 * self.ranks if self.balanced else self.ranks

    @property
    def is_even(self) -> bool:
        """Whether all chunks have the same length."""
        return self.length % self.chunks == 0

    def chunk(self, number: int) -> Rows:
        """Return one of the chunks, which are numbered in the order of their rows."""
        short, longer = self.length // self.chunks, self.length % self.chunks
        # With symbols, Python's min would compile again for each remainder, except where Dynamo traces it: Dynamo turns
        # min into a symbol and, in torch 2.11, refuses sym_min of two ints.
        least: Callable[[int, int], int] = min if torch.compiler.is_dynamo_compiling() else torch.sym_min
        return Rows(number * short + least(number, longer), (number + 1) * short + least(number + 1, longer))

    def held_by(self, rank: int) -> list[Rows]:
        """Return the chunks of a rank, in the order in which it holds them.

        The last rank's two chunks are adjacent. They are joined, so that one call of the op
        computes their outputs, and the second chunk is empty, at the end of the sequence.
        """
        if not self.balanced:
            return [self.chunk(rank)]
        first, second = self.chunk(rank), self.chunk(self.chunks - 1 - rank)
        if rank == self.ranks - 1:
            return [Rows(first.start, second.stop), Rows(self.length, self.length)]
        return [first, second]

    @property
    def held(self) -> list[list[Rows]]:
        """The chunks of each rank."""
        return [self.held_by(rank) for rank in range(self.ranks)]


@dataclass(frozen=True)
class ChunkCall:
    """One call of the op, which computes the outputs of a chunk.

    Attributes:
        chunk: the chunk's rows.
        queries: the rows of queries: earlier rows that the chunk's convolutions read, the chunk,
            and rows after it.
        keys: the rows of keys that the queries see.
    """

    chunk: Rows
    queries: Rows
    keys: Rows

    @classmethod
    def of(cls, chunk: Rows, length: int, spec: Spec, longest: int | None = None) -> ChunkCall:
        """Return the call for a chunk of a sequence of ``length`` rows, or of documents of at most
        ``longest`` rows.

        The op aligns its queries to the end of its keys. So if there is a window, the queries must end
        where the keys end: more rows follow the chunk. Their values do not matter, because convolutions
        read only rows before a row. A condition ``visible`` gets its places by parameters.
        """
        if chunk.count == 0:
            return cls(chunk, chunk, chunk)
        farthest = length if longest is None else max(0, longest - 1)  # key that a row may see, from its own position
        before, after = (farthest if limit is None else min(limit, farthest) for limit in (spec.left, spec.right))
        first = max(0, chunk.start - spec.context)
        keys = Rows(max(0, first - before), min(length, chunk.stop + after))
        is_masked = spec.left is not None or spec.right is not None
        return cls(chunk, Rows(first, keys.stop if is_masked else chunk.stop), keys)

    @property
    def context(self) -> Rows:
        """The rows of queries before the chunk."""
        return Rows(self.queries.start, self.chunk.start)

    @property
    def padding(self) -> int:
        """The number of rows after the chunk."""
        return self.queries.stop - self.chunk.stop


def fresh(calls: Sequence[ChunkCall]) -> list[Rows]:
    """Return the keys of each of a rank's calls that no earlier call has.

    A later call's keys start and end later.
    """
    ends = [0, *(call.keys.stop for call in calls)]
    starts = [min(max(call.keys.start, end), call.keys.stop) for call, end in zip(calls, ends, strict=False)]
    return [Rows(start, call.keys.stop) for start, call in zip(starts, calls, strict=True)]


def regions(calls: Sequence[ChunkCall]) -> list[Rows]:
    """Return, for each of a rank's calls, the rows of the tensor with its keys; overlapping or
    adjacent keys share one.
    """
    first, *others = [call.keys for call in calls]
    result = [first]
    for keys in others:
        if keys.start <= result[-1].stop:
            joined = Rows(result[-1].start, keys.stop)
            result = [joined if region == result[-1] else region for region in result] + [joined]
        else:
            result.append(keys)
    return result


def common(first: Rows, second: Rows) -> Rows:
    """Return the rows that are in both."""
    start = max(first.start, second.start)
    return Rows(start, max(start, min(first.stop, second.stop)))
