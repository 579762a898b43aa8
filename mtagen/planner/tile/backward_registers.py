"""The registers of the fused backward pass's threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..targets import REGISTER_UNIT, Target
from .backward_geometry import BackwardGeometry

_RESERVED = 24  # addresses and loop state
_PRODUCER = 56
_RESERVED_PRODUCER = 12  # part of the producer's registers: addresses and loop state
_DRAWING = 4  # part of the producer's registers with dropout, whose mask it draws
_MAX_COMPUTING = 240  # what setmaxnreg is asked for at most


@dataclass(frozen=True)
class BackwardRegisters:
    """The registers of a CTA's threads.

    Attributes:
        geometry: the geometry of the CTA.
        target: the GPU.
    """

    geometry: BackwardGeometry
    target: Target

    @property
    def split(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of a thread of the producer warpgroup."""
        launch, parts = self.target.registers_of(self.geometry.threads // 32), self.geometry.parts
        if not self.geometry.hopper:
            return launch, 0
        available = (launch * (parts + 1) - _PRODUCER) // parts
        return min(available // REGISTER_UNIT * REGISTER_UNIT, _MAX_COMPUTING), _PRODUCER

    @property
    def needed(self) -> int:
        """Estimated registers of a computing thread: dK, dV, C, dP, state; before Hopper also the
        gradient of W.
        """
        geometry = self.geometry
        columns = geometry.spec.head_dim + geometry.spec.value_head_dim + 2 * geometry.rows
        sums = geometry.keys * columns // (32 * geometry.warps)
        products, operands = 4 * len(geometry.weight_gradient.products), geometry.toeplitz.registers
        return sums + (0 if geometry.hopper else products + operands) + _RESERVED

    @property
    def weight_ahead(self) -> int:
        """Chunks by which a producer warp loads operands ahead of their products, as its registers
        allow.
        """
        gradient = self.geometry.weight_gradient
        room = _PRODUCER - _RESERVED_PRODUCER - _DRAWING * self.geometry.spec.dropout
        return next((ahead for ahead in (2, 1) if gradient.registers(ahead) <= room), 0)
