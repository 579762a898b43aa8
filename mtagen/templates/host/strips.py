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


class Span(NamedTuple):
    """The rows of a strip, and the keys that they see.

    Attributes:
        begin, end: its rows of outputs.
        first: its first row of queries, with which the context begins.
        key0, keys: the first key that some row sees, and the number of keys from there on. For packed documents 0, and
            the most keys of a document that its rows see.
        pitch: elements from one row of a plane to the next.
    """

    begin: int
    end: int
    first: int
    key0: int
    keys: int
    pitch: int

    @property
    def rows(self) -> int:
        """The number of rows, context included."""
        return self.end - self.first


class Division(NamedTuple):
    """The division of a call into strips.

    Attributes:
        sequences: the number of sequences of a strip. The last strips of a batch may have fewer.
        spans: the strips of each sequence in the order of launches.
    """

    sequences: int
    spans: list[Span]

    @property
    def rows(self) -> int:
        """The most rows of a strip."""
        return max((span.rows for span in self.spans), default=0)

    @property
    def pitch(self) -> int:
        """The most elements from one row of a plane to the next."""
        return max((span.pitch for span in self.spans), default=0)

    def first_sees_all(self, n_k: int) -> bool:
        """Whether the first strip of a sequence sees all of its `n_k` keys."""
        return bool(self.spans) and (self.spans[0].key0, self.spans[0].keys) == (0, n_k)

    def is_whole(self, n_k: int) -> bool:
        """Whether a strip has all rows and keys of its sequences."""
        return len(self.spans) == 1 and self.first_sees_all(n_k)

    def overlaps(self, n_q: int, n_k: int) -> dict[int, Overlap]:
        """The overlaps of strips that see a key, in the order of launches, by the first row of queries."""
        spans = [span for span in self.spans if span.keys > 0]
        overlaps = {}
        for span, before, after in zip(spans, [None, *spans], [*spans, None][1:], strict=False):
            summed = (n_q, n_k) if before is None else (before.first, before.key0)
            complete = (0, 0) if after is None else (after.end, after.key0 + after.keys)
            overlaps[span.first] = Overlap(*summed, *complete)
        return overlaps


class Limits(NamedTuple):
    """Numbers of the plan about strips.

    Attributes:
        context: earlier rows of scores that a row of outputs depends on.
        enough_rows: output rows per sequence from which on a strip takes another sequence.
        min_rows, max_rows: limits of the rows of a strip, context included. None is no limit.
        row_multiple: divisor of these rows, unless they are all that are left or the most.
        left, right: keys before and after its own that a row sees. None is no limit.
        window: the same for packed documents, whose left and right are None: the most keys that rows of a document see,
            less the number of these rows.
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
    window: int | None
    key_multiple: int
    begin_multiple: int
    pitch_multiple: int
    itemsize: int

    def pitch(self, keys: int) -> int:
        """The elements from one row of a plane to the next, which holds `keys` keys."""
        return max(1, -(-keys // self.pitch_multiple)) * self.pitch_multiple

    def divided(self, batch: int, n_heads: int, n_q: int, n_k: int, planes: int, workspace_bytes: int) -> Division:
        """Divide a call into strips whose `planes` planes fit the workspace.

        A strip of `min_rows` rows of one sequence may need more.
        """
        elements = workspace_bytes // (planes * n_heads * self.itemsize)  # of a plane, for one head
        rows = self._fitting_rows(elements, n_q, n_q, n_k)
        sequences = max(1, min(batch, rows // (min(n_q, self.enough_rows) + self.context)))
        return Division(sequences, self.spans(elements // sequences, n_q, n_k))

    def spans(self, elements: int, n_q: int, n_k: int) -> list[Span]:
        """The strips of a sequence in the order of launches.

        The last rows come first: under a causal mask they see the most keys, so sums over strips begin with them. Where
        earlier rows see fewer keys, their strips have more rows. Keys never end after those of the strip before,
        although first keys and numbers of keys are rounded.

        Args:
            elements: the most elements of a plane for one head of one sequence. A strip of `min_rows` rows may have
                more.
            n_q, n_k: rows and keys of the sequence.
        """
        spans: list[Span] = []
        end, key_end, multiple = n_q, n_k, self.row_multiple
        while end > 0:
            most, rows = self._most_rows(end), self._fitting_rows(elements, end, n_q, n_k)
            first = end - min(most, max(self.min_rows, rows if rows >= most else rows // multiple * multiple))
            key0, keys = self.keys(first, end, n_q, n_k)
            key_end = min(key_end, key0 + keys)
            begin = first + self.context if first else 0
            spans.append(Span(begin, end, first, key0, key_end - key0, self.pitch(key_end - key0)))
            end = begin
        return spans

    def _most_rows(self, end: int) -> int:
        """The most rows of a strip that ends with row `end`."""
        return end if self.max_rows is None else min(end, self.max_rows)

    def _fitting_rows(self, elements: int, end: int, n_q: int, n_k: int) -> int:
        """The rows of a strip that ends with row `end`, if its planes have `elements` elements for each head."""
        _, keys = self.keys(end - self._most_rows(end), end, n_q, n_k)
        return elements // self.pitch(keys)

    def first_key(self, first: int, n_q: int, n_k: int) -> int:
        """The first key that some row from row `first` on sees; n_k if there is no such row, as without rows."""
        return self.keys(first, n_q, n_q, n_k)[0] if first < n_q else n_k

    def keys_of_step(self, count: int, n_k: int) -> int:
        """The number of keys that some of the last `count` rows of a sequence of at most n_k keys see."""
        return n_k if self.left is None else min(n_k, count + self.left)

    def keys(self, begin: int, end: int, n_q: int, n_k: int) -> tuple[int, int]:
        """The first key that some of the rows begin <= i < end sees, and the number of keys from there on."""
        off = n_k - n_q
        key0 = 0
        if self.left is not None:
            key0 = max(0, begin + off - self.left) // self.begin_multiple * self.begin_multiple
        keys = n_k - key0 if self.window is None else min(n_k - key0, end - begin + self.window)
        if self.right is not None:
            seen = end + off + self.right - key0
            keys = min(keys, -(-seen // self.key_multiple) * self.key_multiple)
        return key0, keys

    def keys_of_blocks(self, first: int, end: int, rows: int, n_q: int, n_k: int) -> list[int]:
        """For each block of `rows` rows of a strip, the number of its keys: those it sees and few others."""
        return [max(0, self.keys(row, min(row + rows, end), n_q, n_k)[1]) for row in range(first, end, rows)]


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
    call: Call, division: Division, batch: int, n_heads: int, planes: int, dtype: torch.dtype
) -> Iterator[Strip]:
    """The strips of a division. All have the same memory, of `planes` planes."""
    sequences, spans = division
    most = sequences * n_heads * max((span.rows * span.pitch for span in spans), default=0)
    memory = [call.workspace(f"plane {number}", (most,), dtype) for number in range(planes)]
    for b0 in range(0, batch, sequences):
        b1 = min(b0 + sequences, batch)
        for begin, end, first, key0, keys, pitch in spans:
            shape = ((b1 - b0) * n_heads, end - first, pitch)
            length = shape[0] * shape[1] * shape[2]
            yield Strip(b0, b1, begin, end, first, key0, keys, [x[:length].view(shape) for x in memory])
