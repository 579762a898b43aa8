"""The kernels of the backward pass that mix heads on the chip.

Both compute scores and gradients of shares, the probabilities after all stages, from queries, keys, values and
gradients of outputs, tile by tile. The first one sums products of probabilities with their gradients, for all rows of a
call. The second one fills two planes of a strip: gradients of scores, and shares. The kernels of ``contractions.py``,
or cuBLAS's, multiply these planes by queries, keys and gradients of outputs.

If nothing is mixed after the softmax, these sums are products of outputs with their gradients. Then there is no first
kernel.
"""

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
from ..kernel import Argument, Buffer, Kernel, numbers, reads, writes
from ..sizes import B0, B1, BATCH, COUNT, N_HEADS
from ..targets import SHARED_BYTES_PER_CYCLE
from .hidden import HiddenKeys
from .kernels import PROGRAMS
from .on_chip import BARRIER, CHUNKS, HEAD_WARPS, KEYS, NUMBERS, OnChip
from .row_shared import MAX_HEADS
from .source import StripSource
from .stages import PROBABILITY_SCALE

PLANES = ("dx", "shares")  # of a strip: gradients of scores, and shares
PARTS = sympy.Symbol("parts", integer=True, positive=True)  # chunks of the keys of a block of rows of a strip
_PAIR_GAP = 64  # bytes between pairs of buffers, so that neighbours' lines of 32 bytes are in different banks
_TENSORS = ("q", "k", "v", "grad_out")


@dataclass(frozen=True)
class OnChipGradient(OnChip, StripSource):
    """A kernel of the backward pass that mixes heads on the chip."""

    rows = 32
    row_warps = 8
    registers = (168, 88)
    tiles_held: ClassVar[int] = 5  # tiles of a head's keys or values in shared memory, for each warp that owns heads
    pairs: ClassVar[int] = 4  # pairs of buffers: for scores, and for gradients of shares
    dots: ClassVar[bool] = False  # whether shared memory has what is subtracted from gradients of probabilities
    fits = True

    @property
    def formula(self) -> Iterator[str]:
        yield "P = softmax of C over the keys that a query sees, dA = grad_out v^T,"
        yield "dP = N^T dA over the heads of a group," if self.stages.post_mix else "dP = dA,"
        yield from self.legend

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the matrices that the kernel reads."""
        return tuple(mixture.weight for mixture in (self.stages.mix, self.stages.post_mix) if mixture)

    @property
    @abstractmethod
    def pointers(self) -> tuple[Argument, ...]:
        """The arguments that point to memory, besides tensors and matrices."""

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that point to memory, and strides."""
        read = (*reads("Element", *_TENSORS), *reads("float", *self.matrices, "lse"))
        return (*read, *self.pointers, *(stride for tensor in _TENSORS for stride in self.strides(tensor)))

    @property
    def reads_outputs(self) -> bool:
        """Whether sums of P dP are products of outputs with their gradients, with which products with values begin."""
        return False

    @property
    def numbers_of_sums(self) -> int:
        """Numbers that each head of a row has for a chunk of keys: the sum of products, and that of probabilities
        if the backward pass normalises them again.
        """
        return 2 if self.stages.normalizes_again else 1

    @property
    def pair(self) -> int:
        """Bytes of a pair of buffers, with the gap behind it."""
        return 2 * self.buffer + _PAIR_GAP

    @property
    def warps(self) -> tuple[int, ...]:
        return HEAD_WARPS, self.row_warps

    @cached_property
    def shared(self) -> SharedMap:
        tile = self.tiles(max(self.spec.head_dim, self.spec.value_head_dim)) // 2
        return SharedMap.of(
            (
                ("TILES", self.tiles_held * tile, 1024),
                ("SCORES", self.pairs * self.pair, 32),
                ("SHIFTS", self.rows * NUMBERS, 16),
                ("DOTS", self.rows * NUMBERS if self.dots else 0, 16),
                ("BEGINNINGS", self.rows * NUMBERS if self.reads_outputs else 0, 16),
                ("BARRIERS", (2 * self.pairs + self.reads_outputs) * BARRIER, BARRIER),
            )
        )

    @property
    def moved(self) -> float:
        streamed = self.spec.head_dim + self.spec.value_head_dim
        return 2 * (2 * streamed / self.rows + 4)  # scores and gradients of shares are written and read

    @property
    def cost(self) -> float:
        return self.moved / SHARED_BYTES_PER_CYCLE

    def _kernel(self, arguments: tuple[Argument, ...], grid: Size) -> Kernel:
        threads, registers = 32 * sum(self.warps), max(self.registers)
        return Kernel(self.role, self.name, arguments, (grid,), threads, self.shared.size, registers)


class DeltaKernel(OnChipGradient):
    """The kernel that sums products of probabilities with their gradients, over chunks of keys."""

    role = "delta"
    tiles_held = 6
    pairs = 3
    registers = (176, 80)
    template = "heads_delta.cu.j2"

    @property
    def legend(self) -> Iterator[str]:
        again = ", and the sums of P" if self.stages.normalizes_again else ""
        yield f"delta = the sums of P dP over chunks of the keys that a query sees{again}, times {PROBABILITY_SCALE}:"
        yield f"(bundles of heads, n_q, chunks, {self.numbers_of_sums}, 16)."

    @property
    def pointers(self) -> tuple[Argument, ...]:
        return writes("float", "delta")

    @property
    def blocks(self) -> Size:
        """Number of blocks of rows of all bundles of heads."""
        return ceiling(N_Q / self.rows) * ceiling(N_HEADS / self.stages.heads) * BATCH

    @property
    def buffer_of_sums(self) -> Buffer:
        """The buffer of the sums."""
        bundles = BATCH * ceiling(N_HEADS / self.stages.heads)
        return Buffer("delta", "fp32", (bundles, N_Q, CHUNKS, self.numbers_of_sums, MAX_HEADS), scratch=True)

    @property
    def kernel(self) -> Kernel:
        lengths = numbers("int", "n_q", "n_k", "n_heads", "group", CHUNKS.name)
        return self._kernel((*self.arguments, *lengths, *numbers("float", "scale")), self.blocks * CHUNKS)


class GradScoresKernel(OnChipGradient):
    """The kernel that fills the planes of a strip with gradients of scores and with shares."""

    role = "grad_scores"
    template = "heads_grad_scores.cu.j2"
    dots = True
    width: ClassVar[int] = 2 * KEYS  # keys that are written at once: lines of 64 bytes
    start: ClassVar[int] = 2  # time to start a CTA, in units of that of `width` keys

    @property
    def legend(self) -> Iterator[str]:
        shares = "N P" if self.stages.post_mix else "P"
        gradient = "M^T P (dP - dots)" if self.stages.mix else "P (dP - dots)"
        outputs = " = grad_out . out" if self.reads_outputs else ""
        yield f"dots = the sums of P dP over all keys{outputs}, less grad_lse; a null grad_lse stands for zeros,"
        yield f"shares = {shares}, dx = {gradient}."
        yield "A strip has the queries first <= i < first + count of the sequences from b0 on, and `keys` keys, which"
        yield "are the first ones of k and v; positions count from them. Planes [slot, row, key] have rows that are"
        delta = "" if self.reads_outputs else "`chunks` is that of delta; "
        yield f"`pitch` elements apart. {delta}`parts` CTAs divide the keys of a block of rows."
        yield "Each CTA adds its part of a matrix's gradient to sums of its own, which the caller sets to zero first:"
        yield "(bundles of heads, PROGRAMS, 16, 16) fp32."

    @property
    def reads_outputs(self) -> bool:
        return self.stages.post_mix is None

    @property
    def pointers(self) -> tuple[Argument, ...]:
        sums = reads("Element", "out") if self.reads_outputs else reads("float", "delta")
        read = (*reads("float", "grad_lse", optional=True), *sums)
        return (*read, *writes("Element", *PLANES), *writes("float", *self.stages.matrix_partials))

    @property
    def offset(self) -> str:
        return "off"

    @property
    def programs(self) -> int:
        """Upper limit of the CTAs of a bundle, which have sums of matrices' gradients of their own."""
        return PROGRAMS

    @property
    def hidden(self) -> HiddenKeys:
        """The hidden keys that other kernels read, the same of both planes: contractions read both, or cuBLAS does."""
        return self.cleared[0]

    @property
    def most_rows(self) -> int:
        """Upper limit of the rows of a strip."""
        return self.programs * self.rows

    @property
    def moved(self) -> float:
        return super().moved + 2 * 4  # results are written and read

    @property
    def blocks(self) -> Size:
        """Number of blocks of rows of a bundle of heads."""
        return ceiling(COUNT / self.rows)

    @property
    def bundles(self) -> Size:
        """Number of bundles of heads of a strip."""
        return ceiling(N_HEADS / self.stages.heads) * (B1 - B0)

    @property
    def kernel(self) -> Kernel:
        lengths = numbers("int", "count", "keys", "off", "first", "pitch", "n_q", "n_heads", "group", "b0")
        chunks = numbers("int", *(() if self.reads_outputs else (CHUNKS.name,)), PARTS.name)
        grid = self.blocks * self.bundles * PARTS
        return self._kernel((*self.arguments, *lengths, *chunks, *numbers("float", "scale")), grid)


def on_chip_kernels(spec: Spec, target: str) -> tuple[OnChipGradient, ...]:
    """Return the kernels of a spec's backward pass, in the order of their launches."""
    scores = GradScoresKernel(spec, target)
    return (scores,) if scores.reads_outputs else (DeltaKernel(spec, target), scores)
