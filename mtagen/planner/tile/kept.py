"""What dropout keeps of a tile of probabilities: bits in shared memory, which other warps may draw a step ahead."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel import numbers, reads

# What kernels take: those that draw, and those that scale what is kept.
DRAW = (*reads("long long", "seed"), *numbers("int", "threshold"))
KEEP_SCALE = numbers("float", "keep_scale")
_GROUP = 8  # keys that one call of the generator serves


@dataclass(frozen=True)
class KeptBits:
    """The bits of a tile, in the order of the keys.

    A thread draws two groups of keys at a time; the first one begins at most ``shift`` keys before the tile.

    Attributes:
        rows: rows of the tile.
        columns: its keys.
        shift: the most keys that are drawn before its first one.
        buffers: tiles whose bits are kept at a time.
    """

    rows: int
    columns: int
    shift: int
    buffers: int

    @property
    def pairs(self) -> int:
        """Pairs of groups that are drawn of a row."""
        return -(-(self.shift + self.columns) // (2 * _GROUP))

    @property
    def row(self) -> int:
        """Bytes of a row: the words of its columns, and one more that a shifted word ends in."""
        return 4 * (-(-self.columns // 32) + (self.shift > 0))

    @property
    def tile(self) -> int:
        """Bytes of a tile."""
        return self.rows * self.row

    @property
    def size(self) -> int:
        """Bytes of all tiles."""
        return self.buffers * self.tile
