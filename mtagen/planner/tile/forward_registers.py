"""The registers of the fused forward pass's threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..targets import Target
from .forward_geometry import ForwardGeometry

# Registers that computing threads give to those that draw dropout masks (benchmarks/notes/data.md, "Dropout").
_SPARED = 8
_RESERVED = {True: 18, False: 50}  # addresses, loop state, softmax state; without wgmma, A and B operands too
# Registers of a thread of a computing warpgroup, and of the producer warpgroup, by the number of computing warpgroups.
_SPLITS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
_DRAWING_SPLITS = {1: (240, 56), 2: (224, 56), 3: (160 - _SPARED, 56)}  # drawing takes more registers than loading


@dataclass(frozen=True)
class ForwardRegisters:
    """The registers of a CTA's threads.

    Attributes:
        geometry: the geometry of the CTA.
        target: the GPU.
        query_fragments, blocks: the rest of the decision: see ``TileForward``.
    """

    geometry: ForwardGeometry
    target: Target
    query_fragments: int
    blocks: int

    @property
    def split(self) -> tuple[int, int]:
        """Registers of a thread of a computing warpgroup, and of the producer warpgroup."""
        if self.geometry.hopper:
            return (_DRAWING_SPLITS if self.geometry.spec.dropout else _SPLITS)[self.geometry.warps // 4]
        return self.target.registers_of(self.geometry.threads // 32 * self.blocks), 0

    @property
    def spared(self) -> int:
        """Registers that a computing thread gives to producer threads that draw masks.

        It may spill as many.
        """
        return _SPARED if self.geometry.spec.dropout and self.geometry.hopper else 0

    @property
    def needed(self) -> int:
        """Estimated registers of a computing thread: O, scores, on Hopper also convolved scores, B
        operands, Q.
        """
        geometry, hopper = self.geometry, self.geometry.hopper
        accumulators = geometry.spec.value_head_dim // 2 + (2 if hopper else 1) * (geometry.keys // 2)
        tiles = geometry.row_tiles * (accumulators + 4 * self.query_fragments)
        operands = 0 if geometry.toeplitz.pointwise else geometry.toeplitz.registers
        return tiles + operands + _RESERVED[hopper]
