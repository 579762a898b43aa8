"""The shared memory of a kernel of rows: sums over warps, and a ring of slots for each warp."""

from __future__ import annotations

from dataclasses import dataclass

from .row_formula import RowFormula

MAX_HEADS = 16  # rows of an mma
BLOCK_KEYS = 64  # keys of a warp's block, as in rows.cuh
_MAX_DEPTH = 8


@dataclass(frozen=True)
class RowShared:
    """The shared memory of a CTA.

    Attributes:
        formula: the formula that the kernel computes.
        warps: number of warps of a CTA.
        room: bytes that the CTA may use.
    """

    formula: RowFormula
    warps: int
    room: int

    @property
    def sums(self) -> int:
        """Bytes for sums over warps: of gradients of matrices, or over a row."""
        return 4 * (MAX_HEADS * MAX_HEADS if self.formula.sums_matrices else 2 * MAX_HEADS) * self.warps

    @property
    def block(self) -> int:
        """Bytes of a warp's block."""
        return BLOCK_KEYS * MAX_HEADS * 2

    @property
    def mask(self) -> int:
        """Bytes of a block's dropout mask, a word per lane, if a second loop over the row needs it
        again.
        """
        formula = self.formula
        return 4 * 32 if formula.drops and formula.backward and formula.reads_scores else 0

    @property
    def slot(self) -> int:
        """Bytes of a slot: a block of each plane, and its dropout mask."""
        return self.formula.planes * self.block + self.mask

    @property
    def depth(self) -> int:
        """Number of slots of a ring: blocks of each plane that a warp copies ahead of its work."""
        return min(_MAX_DEPTH, (self.room - self.sums) // (self.slot * self.warps))

    @property
    def size(self) -> int:
        """Bytes of all sums and rings."""
        return self.sums + self.depth * self.slot * self.warps
