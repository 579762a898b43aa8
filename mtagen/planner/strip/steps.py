"""CUDA kernels of the lowering "strip" that convolve the few rows of a decode step, on the tensor
cores.

A tile of :mod:`mtagen.planner.strip.planes` has 16 rows per warp, most of which a decode step does
not have or does not need. Here the 16 rows of an mma are chunks of 8 keys of one row, as in the
fused decode kernel. Only rows that later kernels read are computed: those of the new tokens and,
before the softmax, those that the convolution after the softmax needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...spec import Spec
from ..cuda.toeplitz import CHUNK
from ..kernel import Kernel, numbers, reads, writes
from ..sizes import COUNT, KEYS, SLOTS
from .sequence import step_numbers
from .slab import Slab
from .source import DECODE, StripSource
from .stages import Convolution

WARPS = 4
WARP_KEYS = 16 * CHUNK  # keys of a warp in a tile
WALK = 4  # tiles per CTA
MAX_ROWS = 8  # upper limit of a CTA's rows, whose sums are in registers
MAX_DEPTH = 3  # upper limit of slabs in shared memory
_FEW_TAPS = 48  # registers of a thread for taps up to which 4 CTAs fit a multiprocessor


@dataclass(frozen=True)
class StepKernel(StripSource):
    """The kernel of a convolution of planes in a decode step.

    Attributes:
        spec: the request.
        target: name of the target.
        stage: the convolution.
        result: element type of the results, ``fp16`` or that of q.
    """

    spec: Spec
    target: str
    stage: Convolution
    result: str

    template = "plane_step.cu.j2"
    source = "fp16"  # element type of the convolved plane

    @property
    def role(self) -> str:
        return f"{DECODE}{self.stage.name}"

    @property
    def fits(self) -> bool:
        if self.mask.zeroes_terms:  # a score may count in some rows of results and not in others
            return False
        return self.slab.exists and self.depth >= 2

    # ---- Rows

    @property
    def first_row(self) -> int:
        """First row of results that is needed."""
        return self.spec.context if self.stage.final else self.stages.first_valid

    @property
    def rows(self) -> int:
        """Number of rows of a CTA, which is even: those that one new token needs, up to
        ``MAX_ROWS``.
        """
        return min(MAX_ROWS, -(-(self.spec.context - self.first_row + 1) // 2) * 2)

    # ---- The division of the work

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return WARPS

    @property
    def warp_keys(self) -> int:
        """Number of keys of a warp in a tile."""
        return WARP_KEYS

    @property
    def tiles_per_cta(self) -> int:
        """Number of tiles that a CTA computes."""
        return WALK

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return 4 if 2 * (self.stage.cq + 1) * self.slab.toeplitz.chunks <= _FEW_TAPS else 2

    # ---- Shared memory

    @cached_property
    def slab(self) -> Slab:
        """The scores that a tile reads."""
        return Slab(self.stage, self.rows, WARPS * WARP_KEYS)

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab."""
        return self.slab.rows * self.slab.chunks * 2 * CHUNK

    @property
    def depth(self) -> int:
        """Number of slabs of the ring: one is used while the others are loaded."""
        return min(MAX_DEPTH, self.gpu.shared_of(1) // self.slab_bytes)

    @property
    def kernel(self) -> Kernel:
        arguments = (
            *reads("Source", "x"),
            *reads("float", self.stage.weight),
            *writes("Result", "out"),
            *reads("int", "seqlens"),
            *step_numbers(self.spec, "int"),
            *numbers("int", "count", "keys", "pitch", "n_heads", "b0"),
        )
        walks = ceiling(KEYS / (WALK * WARPS * WARP_KEYS))
        grid = (ceiling((COUNT - self.first_row) / self.rows) * walks * SLOTS,)
        shared, registers = self.depth * self.slab_bytes, self.gpu.registers_of(WARPS * self.ctas)
        return Kernel(self.role, self.name, arguments, grid, 32 * WARPS, shared, registers)

    @property
    def legend(self) -> Iterator[str]:
        stage = self.stage
        factor = "" if stage.factor == 1 else f"{stage.factor} * "
        yield f"{stage.title} of multi-token attention in a decode step, kernel {stage.cq} x {stage.ck}."
        yield "In every plane [slot, r, j], where rows 0 <= r < count exist, and the keys j of its sequence:"
        yield f"out[r, j] = {factor}sum over u, v of W[u, v] x[r - {stage.cq - 1} + u, j - {stage.pad_left} + v],"
        yield f"for rows from {self.first_row} on; the last row is the end of its sequence. Hidden results are zeros."

    @property
    def summary(self) -> str:
        return f"CUDA, tiles of {self.rows} rows and {WARPS * WARP_KEYS} keys, {WARPS} warps"
