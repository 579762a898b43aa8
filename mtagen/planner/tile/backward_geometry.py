"""The geometry of the fused backward pass: row tiles, columns, and their division among warps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...spec import Spec
from ..cuda.memory import PANEL
from ..cuda.toeplitz import CHUNK, Toeplitz, toeplitz
from ..cuda.weight import WeightGradient, weight_gradient

ROW_TILE = 16  # rows of a warp


@dataclass(frozen=True)
class BackwardGeometry:
    """The extents of a CTA's tiles.

    Attributes:
        spec: the request.
        hopper, warps, rows, keys: the decision: see ``TileBackward``.
    """

    spec: Spec
    hopper: bool
    warps: int
    rows: int
    keys: int

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * self.warps + (128 if self.hopper else 0)

    # ---- Rows

    @property
    def row_tiles(self) -> int:
        """Number of row tiles of a step."""
        return self.rows // ROW_TILE

    @property
    def gradient_ring(self) -> int:
        """Number of row tiles of G in shared memory: those of a step, and the last of the step
        before.
        """
        return self.row_tiles + 1

    # ---- Columns

    @property
    def pads_weight(self) -> bool:
        """Whether to pad W to 9 columns with zeros. It pays for 7 or 8 rows and 6 to 9 columns.

        G then begins at the beginning of a chunk, so that each producer warp, which has four row
        shifts in each of two row tiles there, multiplies one chunk fewer. Other extents gain little
        or lose (benchmarks/notes/cuda-backward.md, "Filters of 7 and 8 rows").
        """
        return self.hopper and self.spec.cq in (7, 8) and 6 <= self.spec.ck <= 9

    @property
    def taps(self) -> int:
        """Number of columns of W, padded with zeros to an odd number: tiles are written two columns
        at a time.
        """
        return 9 if self.pads_weight else self.spec.ck | 1

    @property
    def halo(self) -> int:
        """Number of columns of a window after its first."""
        return self.taps - 1

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution, and its adjoint, whose taps are w*(u, v) = W[cq-1-u, taps-1-v]."""
        return toeplitz(self.spec.cq, self.taps, pairs=False)

    @property
    def parts(self) -> int:
        """Number of parts of the columns, each of ``row_tiles`` warps: on Hopper, of computing
        warpgroups.
        """
        return self.warps // self.row_tiles

    @property
    def owned(self) -> int:
        """Number of keys whose P and G a CTA computes, from c0 + pad_left on: windows must lie in
        the tile of S.
        """
        return self.keys - self.halo

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warp computes; operands of wgmma must not cross a panel.

        A warpgroup that computes columns of dQ reads all of dS from shared memory, so as few
        warpgroups do so as have registers for the sums. At a head dim of 64, each of three
        warpgroups has room for 32 columns, not for 64.
        """
        dim = self.spec.head_dim
        if not self.hopper:
            return 16 * -(-dim // (16 * self.parts))
        return dim // 2 if dim == PANEL and self.parts > 2 else min(dim, PANEL)

    @property
    def dq_parts(self) -> int:
        """Number of parts of the warps that compute dQ, each some of its columns."""
        return -(-self.spec.head_dim // self.dq_columns)

    # ---- Gradients of K and V without wgmma: a warp has blocks of 16 x 16 sums

    @property
    def dim_warps(self) -> int:
        """Number of warps that divide the columns of dK and dV, so that a warp's part is about
        square.
        """
        blocks = self.spec.head_dim // 16
        splits = [n for n in range(1, self.warps + 1) if blocks % n == self.warps % n == 0]
        splits = [n for n in splits if self.keys // 16 % (self.warps // n) == 0]
        return min(splits, key=lambda n: blocks // n + self.keys // 16 * n // self.warps, default=0)

    @property
    def key_warps(self) -> int:
        """Number of warps that divide the keys of dK and dV."""
        return self.warps // self.dim_warps if self.dim_warps else 0

    # ---- Gradient of W

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """The division of the gradient of W among warps.

        Producer warps load operands as they are multiplied, unless there is one set of row shifts,
        for which that took longer in bf16 (benchmarks/notes/cuda-backward.md, "Scores are converted once").
        """
        first_chunk, sets = -self.halo // CHUNK, 1 if self.hopper else self.parts
        return weight_gradient(
            self.spec.cq,
            1 - first_chunk,  # the last chunk of S has the same number as that of G
            (self.halo, self.keys),
            first_chunk=first_chunk,
            sets=sets,
            loaded=self.hopper,
        )

    @property
    def converts_scores(self) -> bool:
        """Whether producer warps convert S from fp16 to elements, in place, after convolutions have
        read it.

        The next step's convolution reads the last row tile, too, so the gradient of W lags by a row
        tile, like dS.
        """
        return self.weight_gradient.loaded and self.spec.dtype != "fp16"

    # ---- Arrays in shared memory, and vectors

    @property
    def panels(self) -> int:
        """Number of panels of 64 columns of a tile of rows of Q or K."""
        return -(-self.spec.head_dim // PANEL)

    @property
    def value_panels(self) -> int:
        """Number of panels of 64 columns of a tile of rows of dO or V."""
        return -(-self.spec.value_head_dim // PANEL)

    @property
    def slab_row(self) -> int:
        """Bytes from a row of a score tile to the next of its parity; an odd chunk avoids bank
        conflicts.
        """
        return 2 * self.keys + 16

    @property
    def tap_words(self) -> int:
        """Words of the table of pairs of neighbouring taps of a row of W, with zeros on both sides."""
        return CHUNK * self.toeplitz.chunks + 6

    @staticmethod
    def row_lanes(dim: int) -> int:
        """Number of threads that share a row of `dim` elements in 16-byte columns, a power of two."""
        return 1 << (dim // 8 - 1).bit_length()

    @property
    def statistics_lanes(self) -> int:
        """Number of threads of the first kernel that share a row: of dO, and of the sums of dQ that they zero."""
        return self.row_lanes(max(self.spec.head_dim, self.spec.value_head_dim))
