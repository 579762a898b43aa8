"""The scores around a tile of results that its convolution reads: a score tile ("slab") in shared
memory.

The slab begins before the tile: by the rows that the filter reaches up, and by the keys that it
reaches left, rounded up to whole chunks of 8. Columns that the rounding adds have taps of zero. The
adjoint is the convolution with the filter turned by 180 degrees, which reaches down and right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..cuda.toeplitz import CHUNK, Toeplitz, supports_filter, toeplitz
from .stages import Convolution


@dataclass(frozen=True)
class Slab:
    """The slab of a tile of results.

    Attributes:
        stage: the convolution.
        tile_rows, tile_keys: extents of the tile of results.
        adjoint: whether the filter is turned.
    """

    stage: Convolution
    tile_rows: int
    tile_keys: int
    adjoint: bool = False

    @property
    def rows_above(self) -> int:
        """Number of rows above the tile."""
        return 0 if self.adjoint else self.stage.cq - 1

    @property
    def keys_left(self) -> int:
        """Number of keys to the left of the tile."""
        return self.stage.aligned_right if self.adjoint else self.stage.aligned_left

    @property
    def keys_right(self) -> int:
        """Number of keys to the right of the tile."""
        return CHUNK * self.chunks - self.keys_left - self.tile_keys

    @property
    def spare(self) -> int:
        """Number of columns of a window before that of the first tap."""
        return self.keys_left - (self.stage.pad_right if self.adjoint else self.stage.pad_left)

    @property
    def exists(self) -> bool:
        """Whether tensor cores can convolve with the filter and its spare columns."""
        return supports_filter(self.stage.cq, self.stage.ck + self.spare)

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution, with the spare columns as taps of zero.

        Raises:
            PlanError: the slab does not exist.
        """
        return toeplitz(self.stage.cq, self.stage.ck + self.spare, pairs=False)

    @property
    def rows(self) -> int:
        """Number of rows, which is even."""
        return (self.tile_rows + self.stage.cq) // 2 * 2

    @property
    def chunks(self) -> int:
        """Number of chunks of a row that are filled."""
        return self.tile_keys // CHUNK + self.toeplitz.chunks - 1

    @property
    def row(self) -> int:
        """Bytes from a row to the next of its parity: an odd number of chunks avoids bank conflicts."""
        return 2 * CHUNK * (self.chunks | 1)
