"""Which rows of a sequence each rank holds, and which it needs besides. All of it is arithmetic on row numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..spec import Spec


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
    def chunks(self) -> list[range]:
        """All chunks, in the order of their rows."""
        count = 2 * self.ranks if self.balanced else self.ranks
        short, longer = divmod(self.length, count)
        starts = [number * short + min(number, longer) for number in range(count + 1)]
        return [range(*ends) for ends in pairwise(starts)]

    @property
    def is_even(self) -> bool:
        """Whether all chunks are as long as each other."""
        return self.length % (2 * self.ranks if self.balanced else self.ranks) == 0

    @property
    def held(self) -> list[list[range]]:
        """The chunks of each rank, in the order in which it holds them."""
        chunks = self.chunks
        if self.balanced:
            return [[chunks[rank], chunks[-1 - rank]] for rank in range(self.ranks)]
        return [[chunk] for chunk in chunks]


@dataclass(frozen=True)
class Call:
    """One call of the op, which makes the outputs of a chunk.

    Attributes:
        own: the chunk's rows.
        queries: the rows of queries: the chunk's, those before it that its convolutions read, and rows after it.
        keys: the rows of keys that the chunk's queries see.
    """

    own: range
    queries: range
    keys: range

    @classmethod
    def of(cls, chunk: range, length: int, spec: Spec, longest: int | None = None) -> Call:
        """The call for a chunk of a sequence of ``length`` rows, or of packed documents of ``longest`` rows at most.

        The op aligns its queries to the end of its keys. So where the mask depends on positions, the queries must end
        where the keys end: rows follow the chunk's own. What these hold does not matter, because convolutions read
        rows before a row only.
        """
        if not chunk:
            return cls(chunk, chunk, chunk)
        farthest = length if longest is None else max(0, longest - 1)  # key that a row may see, from its own position
        before, after = (farthest if limit is None else min(limit, farthest) for limit in (spec.left, spec.right))
        first = max(0, chunk.start - spec.context)
        keys = range(max(0, first - before), min(length, chunk.stop + after))
        is_masked = spec.left is not None or spec.right is not None
        return cls(chunk, range(first, keys.stop if is_masked else chunk.stop), keys)

    @property
    def context(self) -> range:
        """The rows of queries before the chunk's own."""
        return range(self.queries.start, self.own.start)

    @property
    def padding(self) -> int:
        """The number of rows after the chunk's own."""
        return self.queries.stop - self.own.stop


def common(first: range, second: range) -> range:
    """The rows that are in both."""
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))
