"""Which rows of a sequence each rank holds, and which it needs besides. All of it is arithmetic on row numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..spec import Spec


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a sequence.

    Attributes:
        start: the first one's number. As ``stop`` it may be a symbol of ``torch.compile``, which ``range`` cannot hold.
        stop: the number after the last one's.
    """

    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


@dataclass(frozen=True)
class Sharding:
    """A sequence cut into chunks, which ranks hold.

    Chunks are as long as each other or, the first ones, one row longer, as ``torch.tensor_split`` cuts; of a short
    sequence some are empty.

    Attributes:
        length: rows of the sequence.
        ranks: W.
        balanced: whether there are 2W chunks, of which rank r holds r and 2W-1-r, or W, of which it holds r. Of causal
            attention, whose later rows see more keys, the former gives all ranks the same work.
    """

    length: int
    ranks: int
    balanced: bool

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return 2 * self.ranks if self.balanced else self.ranks

    @property
    def is_even(self) -> bool:
        """Whether all chunks are as long as each other."""
        return self.length % self.chunks == 0

    def chunk(self, number: int) -> Rows:
        """One of the chunks, which are numbered in the order of their rows."""
        short, longer = self.length // self.chunks, self.length % self.chunks
        # Of symbols, Python's min would compile anew for each remainder, but not where Dynamo traces it, which makes a
        # symbol of it and, in torch 2.11, refuses sym_min of two ints.
        least: Callable[[int, int], int] = min if torch.compiler.is_dynamo_compiling() else torch.sym_min
        return Rows(number * short + least(number, longer), (number + 1) * short + least(number + 1, longer))

    def held_by(self, rank: int) -> list[Rows]:
        """The chunks of a rank, in the order in which it holds them.

        Where two lie side by side, as the last rank's do, they are joined, so that one call of the op makes their
        outputs, and the second one is empty, at the end of the sequence.
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
class Call:
    """One call of the op, which makes the outputs of a chunk.

    Attributes:
        own: the chunk's rows.
        queries: the rows of queries: the chunk's, those before it that its convolutions read, and rows after it.
        keys: the rows of keys that the chunk's queries see.
    """

    own: Rows
    queries: Rows
    keys: Rows

    @classmethod
    def of(cls, chunk: Rows, length: int, spec: Spec, longest: int | None = None) -> Call:
        """The call for a chunk of a sequence of ``length`` rows, or of packed documents of ``longest`` rows at most.

        The op aligns its queries to the end of its keys. So where the mask depends on positions, the queries must end
        where the keys end: rows follow the chunk's own. What these hold does not matter, because convolutions read
        rows before a row only.
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
        """The rows of queries before the chunk's own."""
        return Rows(self.queries.start, self.own.start)

    @property
    def padding(self) -> int:
        """The number of rows after the chunk's own."""
        return self.queries.stop - self.own.stop


def fresh(calls: Sequence[Call]) -> list[Rows]:
    """The keys of each of a rank's calls that none before it takes. Both ends of a later call's keys are later."""
    ends = [0, *(call.keys.stop for call in calls)]
    starts = [min(max(call.keys.start, end), call.keys.stop) for call, end in zip(calls, ends, strict=False)]
    return [Rows(start, call.keys.stop) for start, call in zip(starts, calls, strict=True)]


def regions(calls: Sequence[Call]) -> list[Rows]:
    """The rows of the tensor that each of a rank's calls takes keys from: one for calls whose keys overlap or meet."""
    first, *others = [call.keys for call in calls]
    made = [first]
    for keys in others:
        if keys.start <= made[-1].stop:
            joined = Rows(made[-1].start, keys.stop)
            made = [joined if region == made[-1] else region for region in made] + [joined]
        else:
            made.append(keys)
    return made


def common(first: Rows, second: Rows) -> Rows:
    """The rows that are in both."""
    start = max(first.start, second.start)
    return Rows(start, max(start, min(first.stop, second.stop)))
