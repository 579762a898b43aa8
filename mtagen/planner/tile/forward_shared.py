"""The shared memory of the fused forward pass: Q, rings of K and V, score tiles, and other arrays."""

from __future__ import annotations

from dataclasses import dataclass

from ..cuda.memory import PANEL, SharedMap, lay_out
from ..cuda.score import score_function
from .dropout_bits import DropoutBits
from .forward_geometry import ForwardGeometry
from .forward_slab import ForwardSlab


@dataclass(frozen=True)
class ForwardShared(SharedMap):
    """The map of a CTA's shared memory.

    Attributes:
        panels: numbers of panels of 64 columns of (Q and K, V).
        tap_bytes: bytes of a head's weights.
        key_tiles: number of tiles of what keys add to scores.
    """

    panels: tuple[int, int]
    tap_bytes: int
    key_tiles: int

    @classmethod
    def made_of(
        cls, geometry: ForwardGeometry, slab: ForwardSlab, dropout: DropoutBits | None, stages: int
    ) -> ForwardShared:
        """Return the map for ``stages`` tiles of K and of V."""
        spec, warps, hopper = geometry.spec, geometry.warps, geometry.hopper
        k_panels, v_panels = -(-spec.head_dim // PANEL), -(-spec.value_head_dim // PANEL)
        tap_bytes, function, key_tiles = 4 * spec.cq * spec.ck, score_function(spec), 2 * stages
        regions = lay_out(
            (
                ("Q", k_panels * geometry.rows * 128, 1024),
                ("K", stages * k_panels * geometry.keys * 128, 1024),
                ("V", stages * v_panels * geometry.keys * 128, 1024),
                ("SLAB", slab.count * 2 * slab.parity, 16),
                ("GATHER", slab.count * geometry.tiles * slab.gather_tile, 16),
                ("DROPOUT", dropout.size if dropout else 0, 4),
                ("TAPS", warps // 4 * tap_bytes if hopper else 0, 4),  # one copy per warpgroup
                ("DIAGONALS", 4 * warps * (geometry.keys + 16) if hopper and function.shares_distances else 0, 16),
                ("KEY_TERMS", 4 * key_tiles * geometry.keys if hopper and function.shares_keys else 0, 16),
                ("BARRIERS", 8 * (4 * stages + 4 * warps) if hopper else 0, 8),
            )
        )
        return cls(regions, (k_panels, v_panels), tap_bytes, key_tiles)
