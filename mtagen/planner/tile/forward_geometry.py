"""The geometry of the fused forward pass: rows and keys of a CTA's tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...spec import DROPOUT_GROUP, Spec
from ..cuda.toeplitz import CHUNK, Toeplitz, toeplitz


@dataclass(frozen=True)
class ForwardGeometry:
    """The extents of a CTA's tiles.

    Attributes:
        spec: the request.
        hopper, warps, keys, row_tiles: the decision: see ``TileForward``.
    """

    spec: Spec
    hopper: bool
    warps: int
    keys: int
    row_tiles: int

    @property
    def threads(self) -> int:
        """Number of threads of a CTA, on Hopper with those of the producer warpgroup."""
        return 32 * self.warps + (128 if self.hopper else 0)

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution."""
        return toeplitz(self.spec.cq, self.spec.ck)

    # ---- Rows

    @property
    def rows(self) -> int:
        """Number of rows of scores that a CTA computes."""
        return 16 * self.row_tiles * self.warps

    @property
    def halo(self) -> int:
        """Number of rows above a row that its output reads."""
        return self.spec.cq - 1

    @cached_property
    def owned(self) -> int:
        """Number of rows of outputs that a CTA computes."""
        return self.rows - self.halo

    # ---- Keys

    @property
    def tiles(self) -> int:
        """Number of output tiles of 8 columns in a tile of keys."""
        return self.keys // CHUNK

    @property
    def lag(self) -> int:
        """Columns by which outputs lag the tiles, so that a window starts on a chunk, ``carry``
        before its tile.
        """
        return self.toeplitz.carry - self.spec.pad_left + self.leading_keys

    @property
    def leading_keys(self) -> int:
        """Keys by which tiles begin before the first key, so that outputs begin with a dropout
        group.
        """
        return (self.spec.pad_left - self.toeplitz.carry) % DROPOUT_GROUP if self.spec.dropout else 0
