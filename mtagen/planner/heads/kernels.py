"""The two kernels of the lowering "heads": arguments, grids, and the warps, registers and shared memory of a CTA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import sympy
from sympy import ceiling

from ...spec import Spec
from ..cuda.memory import SharedMap
from ..geometry.affine import N_Q, Size
from ..kernel import Argument, Kernel, numbers, reads, strides, writes
from ..names import kernel_name
from ..sizes import BATCH, HEADS
from ..strip.on_chip import BARRIER, CHUNKS, HEAD_WARPS, LINE, NUMBERS, OnChip
from ..strip.row_shared import MAX_HEADS
from ..strip.stages import PROBABILITY_SCALE

PARTS = sympy.Symbol("parts", integer=True, positive=True)  # chunks of keys of the outputs
_SUM_THREADS = 256  # of a CTA that adds parts of outputs


@dataclass(frozen=True)
class HeadsKernel(OnChip):
    """A kernel and its source file.

    Attributes:
        spec: the request.
        target: name of the target.
        chunks: number of chunks into which the keys of each block are divided.
    """

    spec: Spec
    target: str
    role: ClassVar[str]
    template: ClassVar[str]
    chunks: ClassVar[sympy.Symbol]

    @property
    def name(self) -> str:
        """The name of the source file and of the kernel."""
        return kernel_name("heads", self.role, self.spec, self.target)

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
    def formula(self) -> Iterator[str]:
        yield "partial = log2 of the sums of 2^C over chunks of the keys that a query sees."

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
                ("REFERENCES", self.rows * NUMBERS, 16),
                ("BARRIERS", self.depth * (HEAD_WARPS + 2) * BARRIER, BARRIER),
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
    def formula(self) -> Iterator[str]:
        mixed = ", A = N P over heads, out = A v" if self.stages.post_mix else ", out = P v"
        yield f"P = softmax of C over the keys that a query sees{mixed}."

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
                ("Q", MAX_HEADS * self.rows * LINE if self.shares_queries else 0, 32),
                ("SHIFTS", self.rows * NUMBERS, 16),
                ("BARRIERS", barriers * BARRIER, BARRIER),
            )
        )

    @property
    def moved(self) -> float:
        streamed = self.spec.head_dim + self.spec.value_head_dim
        queries = 2 if self.shares_queries else 0  # 16 columns for 8 keys
        return 2 * (2 * streamed / self.rows + queries + 4)  # scores and probabilities are written and read
