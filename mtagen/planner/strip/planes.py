"""CUDA kernels of the lowering "strip" that convolve planes, on the tensor cores.

A CTA convolves a block of rows of one plane and loops over a range of their keys, tile by tile. A
tile's window is in shared memory, as a score tile ("slab") of :mod:`mtagen.planner.tile.toeplitz`.
The slab begins before the tile: by the rows that the filter reaches up, and by the keys that it
reaches left, rounded up to whole chunks of 8. Columns that the rounding adds have taps of zero. The
adjoint is the convolution with the filter turned by 180 degrees, which reaches down and right. The
gradient of the weight multiplies the transposed slab by a tile of the results' gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...errors import PlanError
from ...spec import Spec
from ..kernel import Kernel, numbers, reads, writes
from ..sizes import COUNT, KEYS, SLOTS
from ..targets import RESERVED_SHARED, get_target
from ..tile.memory import SharedMap
from ..tile.toeplitz import CHUNK, FLOP_OF_MMA, Toeplitz, toeplitz
from ..tile.weight import WeightGradient, weight_gradient
from .cost import DRAIN, START, STRIP_ROWS, Work
from .documents import PART
from .source import Form, StripSource
from .stages import Convolution

COLLECTED = 64  # columns of results that a warp collects, so that it writes whole lines
RESIDENT_WARPS = 16  # resident warps per multiprocessor, with 128 registers per thread
_SETUP = 20  # instructions per register of taps
PARTS = ("", "adjoint", "gradient")
# Each warp has 16 rows. A CTA of the gradient of a weight owns a tile's keys, and loops over all rows.
_FORMS = tuple(Form(warps, keys=keys, walk=walk) for warps in (4, 8) for keys in (128, 64) for walk in (512, 256, 1024))
_GRADIENT_FORMS = tuple(Form(4, keys=keys) for keys in (64, 128))


@dataclass(frozen=True)
class PlaneKernel(StripSource):
    """The kernel of a convolution of planes, of its adjoint, or of the gradient of its weight.

    Attributes:
        spec: the request.
        target: name of the target.
        stage: the convolution.
        part: one of ``PARTS``: "" for the convolution itself, its adjoint, the gradient of its
            weight.
        result: element type of the results; for a convolution ``fp16`` or that of q.
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
        """Whether the filter is turned."""
        return self.part == "adjoint"

    @property
    def reads(self) -> str:
        """Name of the plane that is convolved."""
        return "dy" if self.adjoint else "x"

    @property
    def writes(self) -> str:
        """Name of the plane of results."""
        return "dx" if self.adjoint else "out"

    @property
    def source(self) -> str:
        """Element type of the convolved plane."""
        return self.spec.dtype if self.adjoint else "fp16"

    @property
    def first_sequence(self) -> str:
        """The number of the strip's first sequence; 0 if the kernel does not need it."""
        return "b0" if any(argument.name == "b0" for argument in self.kernel.arguments) else "0"

    # ---- The window of a tile

    @property
    def rows_above(self) -> int:
        """Number of rows of the slab above the tile."""
        return 0 if self.adjoint else self.stage.cq - 1

    @property
    def keys_left(self) -> int:
        """Number of keys of the slab to the left of the tile."""
        return self.stage.aligned_right if self.adjoint else self.stage.aligned_left

    @property
    def spare(self) -> int:
        """Number of columns of a window before that of the first tap."""
        return self.keys_left - (self.stage.pad_right if self.adjoint else self.stage.pad_left)

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution, with the spare columns as taps of zero."""
        return toeplitz(self.stage.cq, self.stage.ck + self.spare, pairs=False)

    # ---- Shared memory

    @property
    def slab_rows(self) -> int:
        """Number of rows of a slab, which is even."""
        return (self.rows + self.stage.cq) // 2 * 2

    @property
    def slab_chunks(self) -> int:
        """Number of chunks of a row that are filled."""
        return self.tile_keys // CHUNK + self.toeplitz.chunks - 1

    @property
    def slab_row(self) -> int:
        """Bytes from a row of a slab to the next of its parity: an odd number of chunks avoids bank
        conflicts.
        """
        return 2 * CHUNK * (self.slab_chunks | 1)

    @property
    def tile_row(self) -> int:
        """Bytes of a row of a tile of the results' gradient: an odd number of chunks."""
        return 2 * self.tile_keys + 2 * CHUNK

    @property
    def staged_row(self) -> int:
        """Bytes of a row of collected results: an odd number of chunks."""
        return 2 * COLLECTED + 2 * CHUNK

    @cached_property
    def buffer(self) -> SharedMap:
        """The map of a buffer for a tile.

        There are two buffers: one is loaded while the other is used.
        """
        tile = self.rows * self.tile_row if self.part == "gradient" else 0
        return SharedMap.of((("SLAB", self.slab_rows * self.slab_row, 16), ("TILE", tile, 16)))

    @property
    def staged(self) -> int:
        """Bytes of a warp's collected results."""
        return 0 if self.part == "gradient" else 16 * self.staged_row

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return 2 * self.buffer.size + self.warps * self.staged

    @property
    def fits(self) -> bool:
        if self.mask.zeroes_terms:  # a score may count in some rows of results and not in others
            return False
        try:
            _ = self.toeplitz
        except PlanError:
            return False
        return self.shared_bytes <= self.shared_of(1)

    # ---- The decision

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
        tiles, setup = self.tiles_per_cta, _SETUP / 4 * self.warps * 2 * self.mma
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
        """The chunk of the slab in which a window starts, relative to the chunk of results."""
        return 0

    @property
    def owned_gradient(self) -> tuple[int, int]:
        """First column of the results' gradient, and the end of its columns."""
        return 0, self.tile_keys

    @property
    def weight_chunks(self) -> int:
        """Number of chunks of the slab that the windows of a chunk of results touch."""
        return (CHUNK - 1 + self.spare + self.stage.ck - 1) // CHUNK + 1

    @property
    def places(self) -> int:
        """Places of packed documents over which a CTA sums."""
        return PART

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """The division of the gradient among warps."""
        return weight_gradient(self.stage.cq, self.weight_chunks)

    # ---- The kernel

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return self.form.warps

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 16 * self.warps

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return RESIDENT_WARPS // self.warps

    @property
    def tile_keys(self) -> int:
        """Keys of a tile."""
        return self.form.keys

    @property
    def tiles_per_cta(self) -> int:
        """Number of tiles of a convolution that a CTA computes."""
        return self.form.walk // self.form.keys

    @property
    def collected(self) -> int:
        """Number of columns of results that a warp collects before it writes them."""
        return COLLECTED

    @property
    def mma(self) -> int:
        """Number of mma.m16n8k16 per 16 x 8 scores."""
        if self.part == "gradient":
            return len(self.weight_gradient.products) * self.weight_gradient.sets
        return self.toeplitz.mma_per_tile

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment: the formula of the kernel."""
        stage, x = self.stage, f"x[r - {self.stage.cq - 1} + u, j - {self.stage.pad_left} + v]"
        yield f"{stage.title} of multi-token attention, kernel {stage.cq} x {stage.ck} over (queries, keys)."
        yield "In every plane [slot, r, j] of a strip, where rows 0 <= r < count and keys 0 <= j < keys exist:"
        if self.part == "gradient":
            yield f"the gradient of W: partial[u, v] += {1 / stage.scale} * sum over r, j of dy[r, j] {x},"
            yield "one sum per slot and tile of keys."
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
        """The kernel's line in the plan's table."""
        shape = f"tiles of {self.rows} rows and {self.tile_keys} keys, {self.warps} warps"
        return f"CUDA, {shape}, {self.mma} mma.m16n8k16 for 16 x 8 scores"

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
