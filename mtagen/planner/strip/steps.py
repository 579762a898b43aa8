"""The CUDA kernels of the lowering "strip" that convolve the few rows of a decode step, on the tensor cores.

A tile of :mod:`mtagen.planner.strip.planes` has 16 rows for each warp, most of which a decode step does not have or
does not need. Here the rows of an mma are 16 chunks of 8 keys of one row, as in the fused decode kernel, and only rows
are made that later kernels read: those of the new tokens and, before the softmax, those that the convolution after it
needs besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...errors import PlanError
from ...spec import Spec
from ..kernel import Kernel, numbers, reads, writes
from ..tile.toeplitz import CHUNK, toeplitz
from .kernels import step_keys
from .sizes import COUNT, KEYS, SLOTS
from .source import DECODE, StripSource
from .stages import Convolution

WARPS = 4
WARP_KEYS = 16 * CHUNK  # of a tile
WALK = 4  # tiles that a CTA makes
MAX_ROWS = 8  # of a CTA, whose sums are in registers
MAX_DEPTH = 3  # slabs in shared memory
_FEW_TAPS = 48  # registers of a thread for taps, of which 4 CTAs fit a multiprocessor


@dataclass(frozen=True)
class StepKernel(StripSource):
    """A convolution of planes in a decode step.

    Attributes:
        spec: the request.
        target: name of the target.
        stage: the convolution.
        result: type of the elements of the results, ``fp16`` or that of q.
    """

    spec: Spec
    target: str
    stage: Convolution
    result: str

    template = "plane_step.cu.j2"
    source = "fp16"  # type of the elements that are convolved

    @property
    def role(self) -> str:
        return f"{DECODE}{self.stage.name}"

    @property
    def fits(self) -> bool:
        if self.mask.zeroes_terms:  # a score that counts for some rows of results and not for others
            return False
        try:
            _ = self.window_chunks
        except PlanError:
            return False
        return self.depth >= 2

    # ---- Rows

    @property
    def first_row(self) -> int:
        """The first row of results that is needed."""
        return self.spec.context if self.stage.final else self.stages.first_valid

    @property
    def rows(self) -> int:
        """Rows of a CTA, an even number: those that one new token needs, unless they are too many."""
        return min(MAX_ROWS, -(-(self.spec.context - self.first_row + 1) // 2) * 2)

    # ---- The window of a tile

    @property
    def lead(self) -> int:
        """Keys from the slab's first to the tile's."""
        return self.stage.lead_left

    @property
    def spare(self) -> int:
        """Columns of a window that come before the first tap's."""
        return self.lead - self.stage.pad_left

    @cached_property
    def window_chunks(self) -> int:
        """Chunks that a chunk of results reads.

        Raises:
            PlanError: the kernel is too large.
        """
        return toeplitz(self.stage.cq, self.stage.ck + self.spare, pairs=False).chunks

    # ---- How the work is shared

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return WARPS

    @property
    def warp_keys(self) -> int:
        """Keys of a warp, of a tile."""
        return WARP_KEYS

    @property
    def walk(self) -> int:
        """Tiles that a CTA makes."""
        return WALK

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor."""
        return 4 if 2 * (self.stage.cq + 1) * self.window_chunks <= _FEW_TAPS else 2

    # ---- Shared memory

    @property
    def slab_rows(self) -> int:
        """Rows of a slab, an even number."""
        return (self.rows + self.stage.cq) // 2 * 2

    @property
    def slab_chunks(self) -> int:
        """Chunks of a row."""
        return WARPS * WARP_KEYS // CHUNK + self.window_chunks - 1

    @property
    def _slab_bytes(self) -> int:
        return self.slab_rows * self.slab_chunks * 2 * CHUNK

    @property
    def depth(self) -> int:
        """Slabs of a ring: one is worked on while the others are loaded."""
        return min(MAX_DEPTH, self.shared_of(1) // self._slab_bytes)

    @property
    def kernel(self) -> Kernel:
        arguments = (
            *reads("Source", "x"),
            *reads("float", self.stage.weight),
            *writes("Result", "out"),
            *reads("int", "seqlens"),
            *step_keys(self.spec, "int"),
            *numbers("int", "count", "keys", "pitch", "n_heads", "b0"),
        )
        walks = ceiling(KEYS / (WALK * WARPS * WARP_KEYS))
        grid = (ceiling((COUNT - self.first_row) / self.rows) * walks * SLOTS,)
        shared, registers = self.depth * self._slab_bytes, self.registers_of(WARPS * self.ctas)
        return Kernel(self.role, self.name, arguments, grid, 32 * WARPS, shared, min(255, registers))

    @property
    def legend(self) -> Iterator[str]:
        stage = self.stage
        factor = "" if stage.factor == 1 else f"{stage.factor} * "
        yield f"{stage.title} of multi-token attention in a decode step, kernel {stage.cq} x {stage.ck}."
        yield "In every plane [slot, r, j], where rows 0 <= r < count exist, and the keys j of its sequence:"
        yield f"out[r, j] = {factor}sum over u, v of W[u, v] x[r - {stage.cq - 1} + u, j - {stage.pad_left} + v],"
        yield f"for rows from {self.first_row} on; the last one is at the end of its sequence. Hidden ones are zeros."

    @property
    def summary(self) -> str:
        return f"CUDA, tiles of {self.rows} rows and {WARPS * WARP_KEYS} keys, {WARPS} warps"
