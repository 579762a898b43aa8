"""The shared memory of the fused backward pass: rings of row tiles of S and G, and other arrays."""

from __future__ import annotations

from dataclasses import dataclass

from ..cuda.memory import PANEL, Region, SharedMap, lay_out
from ..cuda.score import score_function
from .backward_geometry import ROW_TILE, BackwardGeometry
from .dropout_bits import DropoutBits


@dataclass(frozen=True)
class BackwardShared(SharedMap):
    """The map of a CTA's shared memory.

    Attributes:
        geometry: the geometry of the CTA.
        score_ring: number of row tiles of S: those of a step, and the last of the step before. On
            Hopper the ring spans from the first row tile that the gradient of W reads in a step to
            the last of the next step, which is stored meanwhile.
    """

    geometry: BackwardGeometry
    score_ring: int

    @classmethod
    def fitting(cls, geometry: BackwardGeometry, dropout: DropoutBits | None, room: int) -> BackwardShared:
        """Return the map with the longest ring of S that has room.

        If shared memory has no room for a full ring, the producer warps must finish with the first
        row tiles before they are overwritten.
        """
        least = 2 * geometry.row_tiles if geometry.hopper else geometry.row_tiles + 1
        for ring in range(_full_score_ring(geometry), least - 1, -1):
            shared = cls(_regions(geometry, dropout, ring), geometry, ring)
            if shared.size <= room:
                break
        return shared

    @property
    def waits_for_producer(self) -> bool:
        """Whether the next step's scores overwrite row tiles that a producer warp may still be
        reading.
        """
        return self.score_ring < _full_score_ring(self.geometry)

    @property
    def row_tiles_before_overwrite(self) -> int:
        """How many row tiles a producer warp must finish before the next step may overwrite S.

        If the next step overwrites n row tiles of S, the first n row tiles of the gradient of W are
        the last to read them.
        """
        missing = _full_score_ring(self.geometry) - self.score_ring
        return -(-missing * self.geometry.weight_gradient.sets // self.geometry.row_tiles)


def _full_score_ring(geometry: BackwardGeometry) -> int:
    """Return the number of row tiles of S with which no computing warp waits for a producer warp."""
    if not geometry.hopper:
        return geometry.row_tiles + 1
    return 2 * geometry.row_tiles + 1 + geometry.converts_scores


def _regions(geometry: BackwardGeometry, dropout: DropoutBits | None, score_ring: int) -> tuple[Region, ...]:
    rows, keys, hopper = geometry.rows, geometry.keys, geometry.hopper
    vectors, values = 128 * geometry.panels, 128 * geometry.value_panels  # bytes of a row
    parity = ROW_TILE // 2 * geometry.slab_row
    buffers, scores = (2 if hopper else 1), rows * 128 * -(-keys // PANEL)
    return lay_out(
        (
            ("K", keys * vectors, 1024),
            ("V", keys * values, 1024),
            ("Q", (2 * rows if hopper else ROW_TILE + rows) * vectors, 1024),
            ("Q_ABOVE", ROW_TILE * vectors if hopper else 0, 1024),
            ("DO", buffers * rows * values, 1024),
            ("P", scores, 1024),
            ("DS", scores if hopper else 0, 1024),
            ("S", 2 * score_ring * parity + 16, 16),  # unused windows end past the last row
            ("G", 2 * geometry.gradient_ring * parity + 16, 16),  # the last row's windows reach zeros after it
            ("TAPS", 2 * 4 * geometry.spec.cq * geometry.tap_words, 16),
            ("KEY_TERMS", 4 * keys if hopper and score_function(geometry.spec).shares_keys else 0, 16),
            ("STATISTICS", 2 * 2 * 4 * rows if hopper else 0, 16),
            ("DROPOUT", dropout.size if dropout else 0, 16),
            ("BARRIERS", 40 if hopper else 0, 8),
        )
    )
