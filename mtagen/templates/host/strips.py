from collections.abc import Iterator
from typing import NamedTuple

import torch

from .recipes import Call


class Overlap(NamedTuple):
    """The rows and keys that a strip has in common with others of its sequence.

    Attributes:
        summed_q, summed_k: the row of queries and the key from which on strips before it have summed gradients.
        complete_q, complete_k: the row of queries and the key from which on no later strip adds to gradients.
    """

    summed_q: int
    summed_k: int
    complete_q: int
    complete_k: int


class Limits(NamedTuple):
    """Numbers of the plan about strips.

    Attributes:
        context: earlier rows of scores that a row of outputs depends on.
        enough_rows: output rows per sequence from which on a strip takes another sequence.
        min_rows, max_rows: limits of the rows of a strip, context included. None is no limit.
        row_multiple: divisor of these rows, unless they are all rows or the most.
        left, right: keys before and after its own that a row sees. None is no limit.
        key_multiple: divisor of the keys of a strip, unless they are all keys or end where those of the strip before
            do. It makes products faster.
        begin_multiple: divisor of the first key; dropout draws for groups of keys.
        pitch_multiple: divisor of the elements from one row of a plane to the next.
        itemsize: bytes of an element of a plane.
    """

    context: int
    enough_rows: int
    min_rows: int
    max_rows: int | None
    row_multiple: int
    left: int | None
    right: int | None
    key_multiple: int
    begin_multiple: int
    pitch_multiple: int
    itemsize: int

    def pitch(self, n_k: int, rows: int) -> int:
        """The elements from one row of a plane to the next; a row holds all keys that `rows` rows see."""
        seen = n_k
        if self.left is not None and self.right is not None:
            seen = min(n_k, rows + self.left + self.right + self.begin_multiple - 1)
        return -(-seen // self.pitch_multiple) * self.pitch_multiple

    def sizes(
        self, batch: int, n_heads: int, n_q: int, n_k: int, planes: int, workspace_bytes: int
    ) -> tuple[int, int, int]:
        """Divide the work into strips whose `planes` planes fit the workspace.

        Returns:
            The sequences of a strip, its rows, context included, and the elements from one row of a plane to the next.
            Shorter strips contain fewer masked scores, so they waste less work.
        """
        most = n_q if self.max_rows is None else min(n_q, self.max_rows)
        rows = workspace_bytes // (planes * n_heads * self.pitch(n_k, most) * self.itemsize)
        sequences = max(1, min(batch, rows // (min(n_q, self.enough_rows) + self.context)))
        fitting = rows // sequences // self.row_multiple * self.row_multiple
        rows = min(most, max(self.min_rows, fitting))
        return sequences, rows, self.pitch(n_k, rows)

    def is_whole(self, sizes: tuple[int, int, int], n_q: int, n_k: int) -> bool:
        """Whether a strip of `sizes` has all rows and keys of its sequences."""
        return sizes[1] >= n_q and self.keys(0, n_q, n_q, n_k) == (0, n_k)

    def begins(self, rows: int, n_q: int) -> range:
        """The first row of queries of each strip of a sequence, in the order of launches, if a strip has `rows` rows.

        The last rows come first, because they see the most keys: sums over strips begin with them.
        """
        return range(0, max(n_q - self.context, min(n_q, 1)), max(rows - self.context, 1))[::-1]

    def first_sees_all(self, sizes: tuple[int, int, int], n_q: int, n_k: int) -> bool:
        """Whether the first strip of a sequence sees all keys."""
        begins = self.begins(sizes[1], n_q)
        return bool(begins) and self.keys(begins[0], n_q, n_q, n_k) == (0, n_k)

    def first_key(self, first: int, n_q: int, n_k: int) -> int:
        """The first key that some row from row `first` on sees; n_k if there is no such row, as without rows."""
        return self.keys(first, n_q, n_q, n_k)[0] if first < n_q else n_k

    def spans(self, rows: int, n_q: int, n_k: int) -> dict[int, tuple[int, int, int]]:
        """The strips of a sequence in the order of launches, if a strip has `rows` rows.

        Returns:
            For the first row of queries of each strip: the end of its rows, the first key that some of them sees, and
            the number of keys from there on. Keys never end after those of the strip before, although first keys
            and numbers of keys are rounded.
        """
        spans, key_end = {}, n_k
        for first in self.begins(rows, n_q):
            end = min(first + rows, n_q)
            key0, keys = self.keys(first, end, n_q, n_k)
            key_end = min(key_end, key0 + keys)
            spans[first] = end, key0, key_end - key0
        return spans

    def overlaps(self, rows: int, n_q: int, n_k: int) -> dict[int, Overlap]:
        """The overlaps of strips that see a key, in the order of launches, by the first row of queries."""
        spans = {first: span for first, span in self.spans(rows, n_q, n_k).items() if span[2] > 0}
        overlaps = {}
        for first, before, after in zip(spans, [None, *spans], [*spans, None][1:], strict=False):
            summed = (n_q, n_k) if before is None else (before, spans[before][1])
            complete = (0, 0) if after is None else (spans[after][0], sum(spans[after][1:]))
            overlaps[first] = Overlap(*summed, *complete)
        return overlaps

    def keys_of_step(self, count: int, n_k: int) -> int:
        """The number of keys that some of the last `count` rows of a sequence of at most n_k keys see."""
        return n_k if self.left is None else min(n_k, count + self.left)

    def keys(self, begin: int, end: int, n_q: int, n_k: int) -> tuple[int, int]:
        """The first key that some of the rows begin <= i < end sees, and the number of keys from there on."""
        off = n_k - n_q
        key0 = 0
        if self.left is not None:
            key0 = max(0, begin + off - self.left) // self.begin_multiple * self.begin_multiple
        keys = n_k - key0
        if self.right is not None:
            seen = end + off + self.right - key0
            keys = min(keys, -(-seen // self.key_multiple) * self.key_multiple)
        return key0, keys


class Strip(NamedTuple):
    """A strip.

    Attributes:
        b0, b1: its sequences are b0 <= b < b1.
        begin, end: its rows of outputs.
        first: its first row of queries.
        key0, keys: the first key that some row sees, and the number of keys from there on.
        planes: tensors (slots, rows, pitch).
    """

    b0: int
    b1: int
    begin: int
    end: int
    first: int
    key0: int
    keys: int
    planes: list[torch.Tensor]


def _sum_of_strips(call: Call, name: str, gradient: torch.Tensor, whole: bool, stored: bool) -> torch.Tensor:
    """Memory in which a gradient is summed over strips.

    Args:
        call: the call.
        name: name of the workspace.
        gradient: the result, which is the memory if there is nothing to sum.
        whole: whether each sequence has one strip, of all rows and keys.
        stored: whether the first strip of each sequence stores all of its numbers.
    """
    if whole:
        return gradient
    if stored:
        return call.workspace(name, gradient.shape, torch.float32)
    return call.zeros(gradient.shape, torch.float32)


def _strips(
    call: Call,
    limits: Limits,
    sizes: tuple[int, int, int],
    batch: int,
    n_heads: int,
    n_q: int,
    n_k: int,
    planes: int,
    dtype: torch.dtype,
) -> Iterator[Strip]:
    """The strips of `sizes` that Limits.sizes returned. All have the same memory, of `planes` planes."""
    sequences, rows, pitch = sizes
    length = sequences * n_heads * rows * pitch
    memory = [call.workspace(f"plane {number}", (length,), dtype) for number in range(planes)]
    context = limits.context
    for b0 in range(0, batch, sequences):
        b1 = min(b0 + sequences, batch)
        for first, (end, key0, keys) in limits.spans(rows, n_q, n_k).items():
            begin = first + context if first else 0
            shape = ((b1 - b0) * n_heads, end - first, pitch)
            length = shape[0] * shape[1] * shape[2]
            yield Strip(b0, b1, begin, end, first, key0, keys, [x[:length].view(shape) for x in memory])
