"""The dropout mask of a tile of probabilities: bits in shared memory, which producer warps may draw
ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import DROPOUT_GROUP
from ..kernel import numbers, reads

# Arguments of kernels that draw masks, and of kernels that scale the probabilities that are kept.
DRAW = (*reads("long long", "seed"), *numbers("int", "threshold"))
KEEP_SCALE = numbers("float", "keep_scale")
_LAST_PAIR = 6  # the first column of a chunk's last pair, which the last thread of four has


@dataclass(frozen=True)
class DropoutBits:
    """The bits of a tile's dropout mask, in the order of the keys.

    Attributes:
        rows: rows of the tile.
        columns: keys of the tile.
        drawn: number of keys, from the first on, whose bits are drawn.
        parts: number of parts of the keys, each read by other warps.
        aligned: whether the first key is the first of a dropout group; otherwise it may be any key
            of a group.
        buffers: number of tiles whose bits are stored at a time.
    """

    rows: int
    columns: int
    drawn: int
    parts: int
    aligned: bool
    buffers: int

    @property
    def groups(self) -> int:
        """Number of groups of keys that are drawn per row."""
        return -(-(self.drawn + (0 if self.aligned else DROPOUT_GROUP - 1)) // DROPOUT_GROUP)

    @property
    def row(self) -> int:
        """Bytes of a row: whole words, although a part's first bit may be any bit of a word."""
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
