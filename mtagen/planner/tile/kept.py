"""What dropout keeps of a tile of probabilities: bits in shared memory, which other warps may draw a step ahead."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import DROPOUT_GROUP
from ..kernel import numbers, reads

# What kernels take: those that draw, and those that scale what is kept.
DRAW = (*reads("long long", "seed"), *numbers("int", "threshold"))
KEEP_SCALE = numbers("float", "keep_scale")
_LAST_PAIR = 6  # the first column of a chunk's last pair, which the last thread of four has


@dataclass(frozen=True)
class KeptBits:
    """The bits of a tile, in the order of the keys.

    Attributes:
        rows: rows of the tile.
        columns: its keys.
        drawn: the first of them that are drawn.
        parts: parts of its keys, each of which other warps read.
        aligned: whether its first key is the first of a group, else any key of one.
        buffers: tiles whose bits are kept at a time.
    """

    rows: int
    columns: int
    drawn: int
    parts: int
    aligned: bool
    buffers: int

    @property
    def groups(self) -> int:
        """Groups of keys that are drawn of a row."""
        return -(-(self.drawn + (0 if self.aligned else DROPOUT_GROUP - 1)) // DROPOUT_GROUP)

    @property
    def row(self) -> int:
        """Bytes of a row: the words that threads read, whose part's first bit may lie anywhere in a word."""
        part = self.columns // self.parts
        if self.aligned:
            return 4 * -(-self.columns // 32)
        last_first = DROPOUT_GROUP - 1 + self.columns - part + _LAST_PAIR
        return 4 * (last_first // 32 + -(-part // 32) + 1)

    @property
    def tile(self) -> int:
        """Bytes of a tile."""
        return self.rows * self.row

    @property
    def size(self) -> int:
        """Bytes of all tiles."""
        return self.buffers * self.tile
