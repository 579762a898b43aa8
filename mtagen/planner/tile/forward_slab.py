"""The score tiles ("slabs") of the fused forward pass in shared memory, and the scores in them."""

from __future__ import annotations

from dataclasses import dataclass

from ..cuda.toeplitz import CHUNK, SCORE_EXPONENT
from ..geometry.mask import Mask
from .forward_geometry import ForwardGeometry


@dataclass(frozen=True)
class ForwardSlab:
    """The score tiles of a CTA. With a single tap, scores stay in registers, and there are none.

    Attributes:
        geometry: the geometry of the CTA.
    """

    geometry: ForwardGeometry

    @property
    def count(self) -> int:
        """Number of score tiles.

        With two a warp writes the next tile's scores while others read this one's.
        """
        return 0 if self.geometry.toeplitz.pointwise else 2 if self.geometry.hopper else 1

    @property
    def pad(self) -> int:
        """Rows of zeros before a score tile's first row; even, to keep parities.

        The last cq-1 are the halo.
        """
        return -(-self.geometry.halo // 2) * 2

    @property
    def chunks(self) -> int:
        """Number of chunks of a row that windows read whole."""
        return self.geometry.tiles + self.geometry.toeplitz.chunks - 1

    @property
    def carry_chunks(self) -> int:
        """Number of chunks of the tile before at the beginning of a score tile."""
        return self.geometry.toeplitz.carry // CHUNK

    # ---- Bytes

    @property
    def row(self) -> int:
        """Bytes from a row to the next of its parity; an odd chunk avoids bank conflicts."""
        return 16 * (self.chunks | 1)

    @property
    def parity(self) -> int:
        """Bytes of a score tile's rows of one parity."""
        return (self.geometry.rows + self.pad) // 2 * self.row

    @property
    def gather_tile(self) -> int:
        """Bytes of a tile's gathered columns, one word per row."""
        return 4 * (self.pad + self.geometry.rows + 2) if self.geometry.toeplitz.gathers else 0

    # ---- The scores in it

    @property
    def score_exponent(self) -> int:
        """Exponent of the scale of scores: score tiles hold q.k 2^-exponent, registers hold q.k."""
        return 0 if self.geometry.toeplitz.pointwise else SCORE_EXPONENT

    @property
    def scales_queries(self) -> bool:
        """Whether Q is scaled by 2^-8, which is exact in bf16.

        With fp16 the scores are scaled one by one.
        """
        return self.geometry.spec.dtype == "bf16" and not self.geometry.toeplitz.pointwise

    @property
    def scales_scores(self) -> bool:
        """Whether scores are scaled by 2^-8, because Q is not."""
        return self.score_exponent > 0 and not self.scales_queries

    @property
    def masks_scores(self) -> bool:
        """Whether hidden scores are set to zero.

        With a single tap they only reach hidden outputs.
        """
        return Mask.of(self.geometry.spec).zeroes_scores and not self.geometry.toeplitz.pointwise
