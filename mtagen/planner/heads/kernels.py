"""The two kernels of the lowering "heads": arguments, grids, and the warps, registers and shared memory of a CTA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import sympy
from sympy import Min, ceiling

from ...spec import Spec
from ..cuda.memory import SharedMap, swizzled_bytes
from ..geometry.affine import N_K, N_Q, Size
from ..geometry.mask import Mask
from ..kernel import Argument, Kernel, numbers, reads, strides, writes
from ..names import kernel_name
from ..sizes import BATCH, HEADS
from ..strip.row_shared import MAX_HEADS
from ..strip.sequence import StripSequence
from ..strip.stages import PROBABILITY_SCALE, Stages
from ..targets import get_target

KEYS = 16  # keys of a tile, rows of an mma that sums over heads
HEAD_WARPS = MAX_HEADS // 2  # warps that own two heads each
# Chunks of the keys of a block of rows, each of which a CTA takes: those of the statistics, and those of the outputs.
# With fewer than MIN_CHUNK keys, a CTA takes longer to begin than to work through them.
CHUNKS, PARTS = sympy.symbols("chunks parts", integer=True, positive=True)
MIN_CHUNK = 128
_SUM_THREADS = 256  # of a CTA that adds parts of outputs
_LINE, _LINE_GAP = 2 * KEYS, 16  # bytes of a row of scores of a head, and between the rows of two heads
_BARRIER = 8
_NUMBERS = 4 * MAX_HEADS  # bytes of a number for each head


@dataclass(frozen=True)
class HeadsKernel(ABC):
    """A kernel and its source file. Its CTAs take a block of rows of a bundle of heads.

    Attributes:
        spec: the request.
        target: name of the target.
        role: the kernel's role in the pass.
        rows: rows of a block.
        chunks: number of chunks into which the keys of each block are divided.
        row_warps: warps that own rows.
        registers: registers of a thread of each kind of warps, in the order of their numbers.
    """

    spec: Spec
    target: str
    role: ClassVar[str]
    template: ClassVar[str]
    rows: ClassVar[int]
    chunks: ClassVar[sympy.Symbol]
    row_warps: ClassVar[int]
    registers: ClassVar[tuple[int, ...]]
    tile_keys: ClassVar[int] = KEYS
    head_warps: ClassVar[int] = HEAD_WARPS

    @property
    def name(self) -> str:
        """The name of the source file and of the kernel."""
        return kernel_name("heads", self.role, self.spec, self.target)

    @cached_property
    def stages(self) -> Stages:
        """The stages that the kernels compute."""
        return Stages(self.spec)

    @property
    def sequence(self) -> StripSequence:
        """Which keys a query sees."""
        return StripSequence(self.spec, decodes=False)

    @property
    @abstractmethod
    def formula(self) -> str:
        """The results, for the source's comment."""

    @property
    def comment(self) -> Iterator[str]:
        """Lines of the source's comment."""
        yield f"S = scale q k^T, {'C = M S over the heads of a group' if self.stages.mix else 'C = S'},"
        yield f"{self.formula}."
        yield f"Mask {Mask.of(self.spec).name}; query i sits at position i + n_k - n_q."
        yield f"A bundle is {self.stages.heads} heads, which mix with each other only."
        yield "Strides count elements. `group` heads of q read the same head of k and v. Other tensors are contiguous."

    # ---- The launch

    def strides(self, tensor: str) -> tuple[Argument, ...]:
        """Return the arguments for the strides of a tensor (B, H, N, D), without the last."""
        return strides(tensor)

    def mixtures(self) -> Iterator[str]:
        """Yield the names of the matrices that the kernel reads."""
        if self.stages.mix:
            yield self.stages.mix.weight

    @property
    @abstractmethod
    def pointers(self) -> tuple[Argument, ...]:
        """The arguments that point to memory."""

    @property
    def blocks(self) -> Size:
        """Number of blocks of rows of all bundles of heads."""
        return ceiling(N_Q / self.rows) * ceiling(HEADS / self.stages.heads) * BATCH

    @property
    def slots(self) -> int:
        """Number of CTAs from which on keys are not divided.

        The longest chunk should take no longer than a multiprocessor has work on average, and a
        tenth. If later rows see more keys, the average block has half of the longest one's work.
        """
        target, mask = get_target(self.target), Mask.of(self.spec)
        return 10 * target.multiprocessors // 11 * (2 if mask.favours_later_rows else 1)

    @property
    def visible_keys(self) -> Size:
        """Upper limit of the keys that a block sees."""
        mask = Mask.of(self.spec)
        if mask.left is None or mask.right is None:
            return N_K
        return Min(N_K, mask.left + mask.right + self.rows)

    @property
    def min_chunk(self) -> int:
        """Least number of keys of a chunk if there are several."""
        return MIN_CHUNK

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the numbers of chunks that the kernel takes."""
        return (self.chunks.name,)

    @property
    def kernel(self) -> Kernel:
        """The kernel's arguments and launch."""
        strided = (argument.name for argument in self.pointers if argument.name in "qkv")
        lengths = numbers("int", "n_q", "n_k", "n_heads", "group", *self.counts)
        arguments = (*self.pointers, *strides(*strided), *lengths, *numbers("float", "scale"))
        threads, registers = 32 * sum(self.warps), max(self.registers)
        grid = (self.blocks * self.chunks,)
        return Kernel(self.role, self.name, arguments, grid, threads, self.shared.size, registers)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the source."""
        return (self.kernel,)

    # ---- A CTA

    @property
    @abstractmethod
    def warps(self) -> tuple[int, ...]:
        """Number of warps of each kind, in the order of their numbers."""

    @cached_property
    @abstractmethod
    def shared(self) -> SharedMap:
        """The map of a CTA's shared memory."""

    @property
    @abstractmethod
    def moved(self) -> float:
        """Bytes that are written to and read from shared memory, per score, if all heads have keys of their own."""

    @property
    def buffer(self) -> int:
        """Bytes of the scores of a tile of keys."""
        return MAX_HEADS * (self.rows * _LINE + _LINE_GAP)

    def tiles(self, width: int) -> int:
        """Return the bytes of a tile of keys or values of all heads."""
        return MAX_HEADS * swizzled_bytes(KEYS, width)

    @property
    def summary(self) -> str:
        """The kernel's line in the plan's table."""
        warps, size = " + ".join(map(str, self.warps)), self.shared.size // 1024
        return f"CUDA, {self.stages.heads} heads of {self.rows} rows, tiles of {KEYS} keys, {warps} warps, {size} KiB"


class StatisticsKernel(HeadsKernel):
    """The kernel that sums exponentials of rows over chunks of keys."""

    role = "statistics"
    template = "heads_statistics.cu.j2"
    rows = 64
    chunks = CHUNKS
    row_warps = 8
    registers = (168, 88)
    depth: ClassVar[int] = 3  # tiles of keys, and buffers of scores
    limit: ClassVar[float] = 2.0**20  # of a lane's sum of a row; beyond it the row gets a new reference

    @property
    def formula(self) -> str:
        return "partial = log2 of the sums of 2^C over chunks of the keys that a query sees"

    @property
    def pointers(self) -> tuple[Argument, ...]:
        return (*reads("Element", "q", "k"), *reads("float", *self.mixtures()), *writes("float", "partial"))

    @property
    def warps(self) -> tuple[int, ...]:
        return HEAD_WARPS, self.row_warps

    @cached_property
    def shared(self) -> SharedMap:
        return SharedMap.of(
            (
                ("K", self.depth * self.tiles(self.spec.head_dim), 1024),
                ("SCORES", self.depth * self.buffer, 32),
                ("REFERENCES", self.rows * _NUMBERS, 16),
                ("BARRIERS", self.depth * (HEAD_WARPS + 2) * _BARRIER, _BARRIER),
            )
        )

    @property
    def moved(self) -> float:
        return 2 * (2 * self.spec.head_dim / self.rows + 2)  # keys and scores are written and read


class OutputsKernel(HeadsKernel):
    """The kernel that computes outputs from probabilities, whose sums are known."""

    role = "outputs"
    template = "heads_outputs.cu.j2"
    rows = 32
    chunks = PARTS
    row_warps = 4
    registers = (56, 216, 24)
    producer_warps: ClassVar[int] = 4  # warps that copy keys and values
    depth: ClassVar[int] = 2  # tiles of keys, and of values
    buffers: ClassVar[int] = 4  # of scores
    lead: ClassVar[int] = 2  # tiles by which scores are ahead of products with values
    sum_vector: ClassVar[int] = 4  # outputs of a thread that adds parts of outputs

    @property
    def formula(self) -> str:
        mixed = ", A = N P over heads, out = A v" if self.stages.post_mix else ", out = P v"
        return f"P = softmax of C over the keys that a query sees{mixed}"

    def mixtures(self) -> Iterator[str]:
        yield from super().mixtures()
        if self.stages.post_mix:
            yield self.stages.post_mix.weight

    @property
    def pointers(self) -> tuple[Argument, ...]:
        read = (*reads("Element", "q", "k", "v"), *reads("float", *self.mixtures(), "partial"))
        written = *writes("Element", "out"), *writes("float", "lse"), *writes("float", "partial_out", optional=True)
        return *read, *written

    @property
    def counts(self) -> tuple[str, ...]:
        return CHUNKS.name, PARTS.name

    @property
    def sums(self) -> Kernel:
        """The kernel that adds the parts of outputs, which is launched if there are several."""
        pointers = (*reads("float", "partial_out"), *writes("Element", "out"))
        size = BATCH * HEADS * N_Q * self.spec.value_head_dim
        arguments = (*pointers, *numbers("long long", "size"), *numbers("int", PARTS.name))
        grid = (ceiling(size / (_SUM_THREADS * self.sum_vector)),)
        name = kernel_name("heads", "sums", self.spec, self.target)
        return Kernel("sums", name, arguments, grid, _SUM_THREADS, 0, 64)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.kernel, self.sums

    @property
    def warps(self) -> tuple[int, ...]:
        return self.row_warps, HEAD_WARPS, self.producer_warps

    @property
    def query_fragments(self) -> int:
        """Fragments of 16 columns of queries in registers. The outputs leave room for 3."""
        return min(self.spec.head_dim // 16, 3)

    @property
    def shares_queries(self) -> bool:
        """Whether the last 16 columns of queries are in shared memory."""
        return self.spec.head_dim // 16 > self.query_fragments

    @property
    def share_scale(self) -> float:
        """Factor of probabilities, which are PROBABILITY_SCALE times too large, before they are rounded for
        the product with values. Bf16 has the range to keep the scale, and so has fp16 unless they are mixed.
        """
        return 1 / PROBABILITY_SCALE if self.spec.dtype == "fp16" and self.stages.post_mix else 1.0

    @property
    def output_scale(self) -> float:
        """Factor of outputs, which undoes the rest of the scale."""
        return 1 / (PROBABILITY_SCALE * self.share_scale)

    @cached_property
    def shared(self) -> SharedMap:
        barriers = 2 * self.depth * HEAD_WARPS + 2 * self.buffers
        return SharedMap.of(
            (
                ("K", self.depth * self.tiles(self.spec.head_dim), 1024),
                ("V", self.depth * self.tiles(self.spec.value_head_dim), 1024),
                ("SCORES", self.buffers * self.buffer, 32),
                ("Q", MAX_HEADS * self.rows * _LINE if self.shares_queries else 0, 32),
                ("SHIFTS", self.rows * _NUMBERS, 16),
                ("BARRIERS", barriers * _BARRIER, _BARRIER),
            )
        )

    @property
    def moved(self) -> float:
        streamed = self.spec.head_dim + self.spec.value_head_dim
        queries = 2 if self.shares_queries else 0  # 16 columns for 8 keys
        return 2 * (2 * streamed / self.rows + queries + 4)  # scores and probabilities are written and read
