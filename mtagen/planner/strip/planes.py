"""The CUDA kernels of the lowering "strip": convolutions of planes on the tensor cores.

A CTA convolves a block of rows of one plane and walks along their keys, tile by tile. A tile's window lies in shared
memory as a slab of :mod:`mtagen.planner.tile.toeplitz`, whose first row and first column are before the tile's: by the
rows that the kernel reaches up, and by the keys that it reaches left, in whole chunks of 8. The taps begin as many
columns later as that is too far. The adjoint is the convolution by the kernel turned by 180 degrees, which reaches down
and right. The gradient of the weight multiplies the transposed slab with a tile of the results' gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...errors import PlanError
from ...spec import Spec
from ..kernel import Kernel, numbers, reads, writes
from ..targets import RESERVED_SHARED, get_target
from ..tile.memory import SharedMap
from ..tile.toeplitz import CHUNK, FLOP_OF_MMA, Toeplitz, toeplitz
from ..tile.weight import WeightGradient, weight_gradient
from .cost import DRAIN, START, STRIP_ROWS, Work
from .documents import PART
from .sizes import COUNT, KEYS, SLOTS
from .source import Form, StripSource
from .stages import Convolution

COLLECTED = 64  # columns of results that a warp collects before it writes them, whole lines at a time
RESIDENT_WARPS = 16  # of a multiprocessor: of 128 registers a thread
_SETUP = 20  # instructions for a register of taps
PARTS = ("", "adjoint", "gradient")
# Each warp has 16 rows. A CTA that makes the gradient of a weight owns a tile's keys, and walks along all rows.
_FORMS = tuple(Form(warps, keys=keys, walk=walk) for warps in (4, 8) for keys in (128, 64) for walk in (512, 256, 1024))
_GRADIENT_FORMS = tuple(Form(4, keys=keys) for keys in (64, 128))


@dataclass(frozen=True)
class PlaneKernel(StripSource):
    """A convolution of planes, its adjoint or the gradient of its weight: one kernel, in a source file of its own.

    Attributes:
        spec: the request.
        target: name of the target.
        stage: the convolution.
        part: one of ``PARTS``: the convolution itself, its adjoint, the gradient of its weight.
        result: type of the elements of the results, of a convolution ``fp16`` or that of q.
    """

    spec: Spec
    target: str
    stage: Convolution
    part: str
    result: str

    @property
    def role(self) -> str:
        return f"{self.stage.name}_{self.part}" if self.part else self.stage.name

    @property
    def template(self) -> str:  # type: ignore[override]
        """The kernel's template."""
        return "plane_gradient.cu.j2" if self.part == "gradient" else "plane_convolution.cu.j2"

    @property
    def adjoint(self) -> bool:
        """Whether the kernel is turned."""
        return self.part == "adjoint"

    @property
    def reads(self) -> str:
        """The plane that is convolved."""
        return "dy" if self.adjoint else "x"

    @property
    def writes(self) -> str:
        """The plane of results."""
        return "dx" if self.adjoint else "out"

    @property
    def source(self) -> str:
        """Type of the elements that are convolved."""
        return self.spec.dtype if self.adjoint else "fp16"

    # ---- The window of a tile

    @property
    def rows_above(self) -> int:
        """Rows from the slab's first to the tile's."""
        return 0 if self.adjoint else self.stage.cq - 1

    @property
    def lead(self) -> int:
        """Keys from the slab's first to the tile's."""
        return self.stage.lead_right if self.adjoint else self.stage.lead_left

    @property
    def spare(self) -> int:
        """Columns of a window that come before the first tap's."""
        return self.lead - (self.stage.pad_right if self.adjoint else self.stage.pad_left)

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution, with the spare columns as taps of zero."""
        return toeplitz(self.stage.cq, self.stage.ck + self.spare, pairs=False)

    # ---- Shared memory

    @property
    def slab_rows(self) -> int:
        """Rows of a slab, an even number."""
        return (self.rows + self.stage.cq) // 2 * 2

    @property
    def slab_chunks(self) -> int:
        """Chunks of a row that are filled."""
        return self.tile_keys // CHUNK + self.toeplitz.chunks - 1

    @property
    def slab_row(self) -> int:
        """Bytes from a row to the next of its parity: an odd number of chunks, so that a matrix's rows lie in different
        banks."""
        return 2 * CHUNK * (self.slab_chunks | 1)

    @property
    def tile_row(self) -> int:
        """The same of a tile of the results' gradient."""
        return 2 * self.tile_keys + 2 * CHUNK

    @property
    def staged_row(self) -> int:
        """The same of collected results."""
        return 2 * COLLECTED + 2 * CHUNK

    @cached_property
    def buffer(self) -> SharedMap:
        """What is loaded of a tile. There are two: one is loaded while the other is worked on."""
        tile = self.rows * self.tile_row if self.part == "gradient" else 0
        return SharedMap.of((("SLAB", self.slab_rows * self.slab_row, 16), ("TILE", tile, 16)))

    @property
    def staged(self) -> int:
        """Bytes of a warp's results that are collected."""
        return 0 if self.part == "gradient" else 16 * self.staged_row

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return 2 * self.buffer.size + self.warps * self.staged

    @property
    def fits(self) -> bool:
        if self.mask.zeroes_terms:  # a score that counts for some rows of results and not for others
            return False
        try:
            _ = self.toeplitz
        except PlanError:
            return False
        return self.shared_bytes <= self.shared_of(1)

    # ---- What is decided of it

    @property
    def forms(self) -> Sequence[Form]:
        return _GRADIENT_FORMS if self.part == "gradient" else _FORMS

    @property
    def depends(self) -> str:
        return f"cq{self.stage.cq} ck{self.stage.ck}"

    @property
    def cost(self) -> float:
        target = get_target(self.target)
        window = self.slab_rows * self.slab_chunks * CHUNK / (self.rows * self.tile_keys)
        tiles, setup = self.walk, _SETUP / 4 * self.warps * 2 * self.mma
        if self.part == "gradient":
            tiles, setup = STRIP_ROWS // self.rows, 0
        work = Work(
            traffic=2 * 2,
            moved=window + 1,
            tensor=FLOP_OF_MMA * self.mma / target.mma_flop_per_cycle,
            warps=self.warps,
            ctas=min(self.ctas, target.shared_per_multiprocessor // (self.shared_bytes + RESERVED_SHARED)),
            scores=self.rows * self.tile_keys * tiles,
            gap=START + DRAIN * tiles,
            setup=setup,
        )
        return work.cycles(target)

    # ---- Gradient of the weight

    @property
    def first_weight_chunk(self) -> int:
        """Chunk of the slab, relative to that of the results, in which a window starts."""
        return 0

    @property
    def owned_gradient(self) -> tuple[int, int]:
        """First column of the results' gradient, and the end."""
        return 0, self.tile_keys

    @property
    def weight_chunks(self) -> int:
        """Chunks of the slab that the windows of a chunk of results touch."""
        return (CHUNK - 1 + self.spare + self.stage.ck - 1) // CHUNK + 1

    @property
    def places(self) -> int:
        """Places of packed documents that a CTA sums up."""
        return PART

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """How warps share it."""
        return weight_gradient(self.stage.cq, self.weight_chunks)

    # ---- The kernel

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.form.warps

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 16 * self.warps

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor."""
        return RESIDENT_WARPS // self.warps

    @property
    def tile_keys(self) -> int:
        """Keys of a tile."""
        return self.form.keys

    @property
    def walk(self) -> int:
        """Tiles of a convolution that a CTA makes."""
        return self.form.walk // self.form.keys

    @property
    def collected(self) -> int:
        """Columns of results that a warp collects."""
        return COLLECTED

    @property
    def mma(self) -> int:
        """mma.m16n8k16 for 16 x 8 scores."""
        if self.part == "gradient":
            return len(self.weight_gradient.products) * self.weight_gradient.sets
        return self.toeplitz.mma_per_tile

    @property
    def legend(self) -> Iterator[str]:
        """What the kernel computes."""
        stage, x = self.stage, f"x[r - {self.stage.cq - 1} + u, j - {self.stage.pad_left} + v]"
        yield f"{stage.title} of multi-token attention, kernel {stage.cq} x {stage.ck} over (queries, keys)."
        yield "In every plane [slot, r, j] of a strip, where rows 0 <= r < count and keys 0 <= j < keys exist:"
        if self.part == "gradient":
            yield f"the gradient of W: partial[u, v] += {1 / stage.scale} * sum over r, j of dy[r, j] {x},"
            yield "in a sum of its own for each slot and tile of keys."
            return
        if self.adjoint:
            dy = f"dy[r + {stage.cq - 1} - u, j + {stage.pad_left} - v]"
            yield f"dx[r, j] = sum over u, v of W[u, v] {dy},"
        else:
            factor = "" if stage.factor == 1 else f"{stage.factor} * "
            yield f"out[r, j] = {factor}sum over u, v of W[u, v] {x},"
        skipped = "; so are those of rows before `skip`" if stage.final and not self.adjoint else ""
        yield f"for query first + r, which sits at position first + r + off; hidden results are zeros{skipped}."
        if self.drops:
            yield "Results that dropout keeps are multiplied by keep_scale; others are zeros, too."

    @property
    def summary(self) -> str:
        """In the plan's table."""
        made = f"tiles of {self.rows} rows and {self.tile_keys} keys, {self.warps} warps"
        return f"CUDA, {made}, {self.mma} mma.m16n8k16 for 16 x 8 scores"

    @property
    def kernel(self) -> Kernel:
        registers, packed = self.registers_of(RESIDENT_WARPS), self.spec.packed
        sequence = () if packed else numbers("int", "b0")
        if self.part == "gradient":
            arguments = (
                *reads("Source", "x"),
                *reads("Element", "dy"),
                *writes("float", "partial"),
                *self.strip_arguments("n_heads", *(argument.name for argument in sequence), "all_chunks", skips=False),
            )
            grid = (ceiling(KEYS / self.tile_keys) * SLOTS * (ceiling(COUNT / self.places) if packed else 1),)
        else:
            arguments = (
                *reads("Source", self.reads),
                *reads("float", self.stage.weight),
                *writes("Result", self.writes),
                *self.strip_arguments("n_heads"),
                *self.dropout,
                *(sequence + numbers("float", "keep_scale") if self.drops else ()),
            )
            grid = (ceiling(COUNT / self.rows) * ceiling(KEYS / self.form.walk) * SLOTS,)
        return Kernel(self.role, self.name, arguments, grid, 32 * self.warps, self.shared_bytes, registers)
