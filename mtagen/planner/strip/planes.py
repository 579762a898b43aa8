"""CUDA kernels of the lowering "strip" that convolve planes, on the tensor cores.

A CTA convolves a block of rows of one plane and loops over a range of their keys, tile by tile. The
gradient of the weight multiplies the transposed slab by a tile of the results' gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...spec import Spec
from ..cuda.memory import SharedMap
from ..cuda.toeplitz import CHUNK, FLOP_OF_MMA, Toeplitz
from ..cuda.weight import WeightGradient, weight_gradient
from ..kernel import Kernel, numbers, reads, writes
from ..sizes import COUNT, KEYS, SLOTS
from ..targets import RESERVED_SHARED
from .cost import DRAIN, START, STRIP_ROWS, Work
from .documents import PART
from .hidden import ALL, HiddenKeys
from .slab import Slab
from .source import Form, StripSource
from .stages import Convolution

COLLECTED = 64  # columns of results that a warp collects, so that it writes whole lines
RESIDENT_WARPS = 16  # resident warps per multiprocessor, with 128 registers per thread
_SETUP = 20  # instructions per register of taps
# Each warp has 16 rows. A CTA of the gradient of a weight owns a tile's keys, and loops over all rows.
_FORMS = tuple(Form(warps, keys=keys, walk=walk) for warps in (4, 8) for keys in (128, 64) for walk in (512, 256, 1024))
_GRADIENT_FORMS = tuple(Form(4, keys=keys) for keys in (64, 128))


def plane_kernels(spec: Spec, target: str, stage: Convolution, result: str) -> Iterator[PlaneKernel]:
    """Yield the kernels of a convolution, of its adjoint and of its weight's gradient.

    ``result`` is the element type of the convolution's results, ``fp16`` or that of q.
    """
    yield PlaneConvolution(spec, target, stage, result)
    yield PlaneConvolution(spec, target, stage, spec.dtype, adjoint=True)
    yield PlaneGradient(spec, target, stage)


@dataclass(frozen=True)
class PlaneKernel(StripSource):
    """The kernel of a convolution of planes, of its adjoint, or of the gradient of its weight.

    Attributes:
        spec: the request.
        target: name of the target.
        stage: the convolution.
    """

    spec: Spec
    target: str
    stage: Convolution

    @property
    @abstractmethod
    def slab(self) -> Slab:
        """The scores that a tile reads."""

    @property
    @abstractmethod
    def buffer(self) -> SharedMap:
        """The map of a buffer for a tile.

        There are two buffers: one is loaded while the other is used.
        """

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""

    @property
    @abstractmethod
    def mma(self) -> int:
        """Number of mma.m16n8k16 per 16 x 8 scores."""

    @property
    def fits(self) -> bool:
        # A score that counts in some rows of results and not in others has no place in a plane.
        exists = self.slab.exists and not self.mask.zeroes_terms
        return exists and self.shared_bytes <= self.gpu.shared_of(1)

    @property
    def reads_hidden(self) -> HiddenKeys:
        if self.spec.packed:  # fewer zeros for documents were not measured
            return ALL
        largest = max(max(16 * form.warps, form.keys) for form in self.forms)  # so forms do not change other kernels
        slab = self.slab
        return HiddenKeys(largest, slab.rows - slab.tile_rows, max(slab.keys_left, slab.keys_right))

    # ---- The division of the work

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return self.form.warps

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 16 * self.warps

    @property
    def tile_keys(self) -> int:
        """Keys of a tile."""
        return self.form.keys

    @property
    @abstractmethod
    def tiles_per_cta(self) -> int:
        """Number of tiles that a CTA computes."""

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return RESIDENT_WARPS // self.warps

    # ---- The decision

    @property
    def depends(self) -> str:
        return f"cq{self.stage.cq} ck{self.stage.ck}"

    @property
    def setup(self) -> float:
        """Cycles of a CTA before its first tile."""
        return 0

    @property
    def cost(self) -> float:
        window = self.slab.rows * self.slab.chunks * CHUNK / (self.rows * self.tile_keys)
        work = Work(
            traffic=2 * 2,
            moved=window + 1,
            tensor=FLOP_OF_MMA * self.mma / self.gpu.mma_flop_per_cycle,
            warps=self.warps,
            ctas=min(self.ctas, self.gpu.shared_per_multiprocessor // (self.shared_bytes + RESERVED_SHARED)),
            scores=self.rows * self.tile_keys * self.tiles_per_cta,
            gap=START + DRAIN * self.tiles_per_cta,
            setup=self.setup,
        )
        return work.cycles(self.gpu)

    # ---- The kernel

    @property
    def first_sequence(self) -> str:
        """The number of the strip's first sequence; 0 if the kernel does not need it."""
        return "b0" if any(argument.name == "b0" for argument in self.kernel.arguments) else "0"

    @property
    def taps(self) -> str:
        """The scores that a result reads, in formulas."""
        return f"x[r - {self.stage.cq - 1} + u, j - {self.stage.pad_left} + v]"

    @property
    def legend(self) -> Iterator[str]:
        stage = self.stage
        yield f"{stage.title} of multi-token attention, kernel {stage.cq} x {stage.ck} over (queries, keys)."
        yield "In every plane [slot, r, j] of a strip, where rows 0 <= r < count and keys 0 <= j < keys exist:"

    @property
    def summary(self) -> str:
        shape = f"tiles of {self.rows} rows and {self.tile_keys} keys, {self.warps} warps"
        return f"CUDA, {shape}, {self.mma} mma.m16n8k16 for 16 x 8 scores"


@dataclass(frozen=True)
class PlaneConvolution(PlaneKernel):
    """The kernel of a convolution of planes, or of its adjoint.

    Attributes:
        result: element type of the results.
        adjoint: whether the filter is turned.
    """

    result: str
    adjoint: bool = False

    template = "plane_convolution.cu.j2"

    @property
    def role(self) -> str:
        return f"{self.stage.name}_adjoint" if self.adjoint else self.stage.name

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

    @cached_property
    def slab(self) -> Slab:
        return Slab(self.stage, self.rows, self.tile_keys, self.adjoint)

    @property
    def toeplitz(self) -> Toeplitz:
        """The products that convolve."""
        return self.slab.toeplitz

    @property
    def mma(self) -> int:
        return self.toeplitz.mma_per_tile

    # ---- Shared memory

    @cached_property
    def buffer(self) -> SharedMap:
        return SharedMap.of((("SLAB", self.slab.rows * self.slab.row, 16),))

    @property
    def collected(self) -> int:
        """Number of columns of results that a warp collects before it writes them."""
        return COLLECTED

    @property
    def staged_row(self) -> int:
        """Bytes of a row of collected results: an odd number of chunks."""
        return 2 * COLLECTED + 2 * CHUNK

    @property
    def shared_bytes(self) -> int:
        return 2 * self.buffer.size + self.rows * self.staged_row

    # ---- The decision

    @property
    def forms(self) -> Sequence[Form]:
        return _FORMS

    @property
    def tiles_per_cta(self) -> int:
        return self.form.walk // self.form.keys

    @property
    def setup(self) -> float:
        return _SETUP / 4 * self.warps * 2 * self.mma

    # ---- The kernel

    @property
    def legend(self) -> Iterator[str]:
        stage = self.stage
        yield from super().legend
        if self.adjoint:
            dy = f"dy[r + {stage.cq - 1} - u, j + {stage.pad_left} - v]"
            yield f"dx[r, j] = sum over u, v of W[u, v] {dy},"
        else:
            factor = "" if stage.factor == 1 else f"{stage.factor} * "
            yield f"out[r, j] = {factor}sum over u, v of W[u, v] {self.taps},"
        skipped = ("visible results of rows before `skip`",) if stage.final and not self.adjoint else ()
        zeros = " and ".join((*self.cleared[0].zeros, *skipped))
        zeroed = f"; {zeros} are zeros" if zeros else ""
        yield f"for query first + r, which sits at position first + r + off{zeroed}."
        if self.drops:
            yield "Results that dropout keeps are multiplied by keep_scale; others are zeros, too."

    @property
    def kernel(self) -> Kernel:
        sequence = () if self.spec.packed else numbers("int", "b0")
        arguments = (
            *reads("Source", self.reads),
            *reads("float", self.stage.weight),
            *writes("Result", self.writes),
            *self.sequence.arguments("n_heads"),
            *self.dropout,
            *(sequence + numbers("float", "keep_scale") if self.drops else ()),
        )
        grid = (ceiling(COUNT / self.rows) * ceiling(KEYS / self.form.walk) * SLOTS,)
        registers = self.gpu.registers_of(RESIDENT_WARPS)
        return Kernel(self.role, self.name, arguments, grid, 32 * self.warps, self.shared_bytes, registers)


@dataclass(frozen=True)
class PlaneGradient(PlaneKernel):
    """The kernel of the gradient of a convolution's weight."""

    template = "plane_gradient.cu.j2"

    @property
    def role(self) -> str:
        return f"{self.stage.name}_gradient"

    @cached_property
    def slab(self) -> Slab:
        return Slab(self.stage, self.rows, self.tile_keys)

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """The division of the gradient among warps."""
        chunks = (CHUNK - 1 + self.slab.spare + self.stage.ck - 1) // CHUNK + 1
        return weight_gradient(self.stage.cq, chunks, (0, self.tile_keys))

    @property
    def mma(self) -> int:
        return len(self.weight_gradient.products) * self.weight_gradient.sets

    # ---- Shared memory

    @property
    def tile_row(self) -> int:
        """Bytes of a row of a tile of the results' gradient: an odd number of chunks."""
        return 2 * self.tile_keys + 2 * CHUNK

    @cached_property
    def buffer(self) -> SharedMap:
        slab, tile = self.slab.rows * self.slab.row, self.rows * self.tile_row
        return SharedMap.of((("SLAB", slab, 16), ("TILE", tile, 16)))

    @property
    def shared_bytes(self) -> int:
        return 2 * self.buffer.size

    # ---- The decision

    @property
    def forms(self) -> Sequence[Form]:
        return _GRADIENT_FORMS

    @property
    def tiles_per_cta(self) -> int:
        return STRIP_ROWS // self.rows

    # ---- The kernel

    @property
    def places(self) -> int:
        """Places of packed documents over which a CTA sums."""
        return PART

    @property
    def legend(self) -> Iterator[str]:
        yield from super().legend
        yield f"the gradient of W: partial[u, v] += {1 / self.stage.scale} * sum over r, j of dy[r, j] {self.taps},"
        yield "one sum per slot and tile of keys."

    @property
    def kernel(self) -> Kernel:
        packed = self.spec.packed
        arguments = (
            *reads("Source", "x"),
            *reads("Element", "dy"),
            *writes("float", "partial"),
            *self.sequence.arguments("n_heads", *(() if packed else ("b0",)), "all_chunks", skips=False),
        )
        grid = (ceiling(KEYS / self.tile_keys) * SLOTS * (ceiling(COUNT / PART) if packed else 1),)
        registers = self.gpu.registers_of(RESIDENT_WARPS)
        return Kernel(self.role, self.name, arguments, grid, 32 * self.warps, self.shared_bytes, registers)
