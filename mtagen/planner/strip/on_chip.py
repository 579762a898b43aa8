"""Kernels that mix heads on the chip: which requests have them, and the warps and shared memory of their CTAs.

Mixed scores need the scores of all heads of a group. So a CTA takes a block of rows of a bundle of heads, which mix
only with each other, and streams tiles of a few keys. Warps that own heads and warps that own rows exchange each tile
through shared memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import sympy
from sympy import Min

from ...spec import EXPRESSIONS, Spec
from ..cuda.memory import SharedMap, swizzled_bytes
from ..cuda.supported import DTYPES
from ..geometry.affine import N_K, Size
from ..geometry.mask import Mask
from ..kernel import Argument, strides
from ..targets import Target, get_target
from .row_shared import MAX_HEADS
from .sequence import StripSequence
from .stages import Stages

MAX_DIM = 64  # upper limit of head dims: 16 heads of 32 rows then take half of the registers
_OTHERS = (
    *("kernel", "post_kernel", "dynamic_ranks", "post_dynamic_ranks", *EXPRESSIONS),
    *("visible", "sink", "packed", "dropout", "page_size"),
)
KEYS = 16  # keys of a tile, rows of an mma that sums over heads
HEAD_WARPS = MAX_HEADS // 2  # warps that own two heads each
# Chunks of the keys of a block of rows, each of which a CTA takes
CHUNKS = sympy.Symbol("chunks", integer=True, positive=True)
# With fewer than MIN_CHUNK keys, a CTA takes longer to begin than to work through them.
MIN_CHUNK = 128
BARRIER = 8  # bytes
NUMBERS = 4 * MAX_HEADS  # bytes of a number for each head
LINE, LINE_GAP = 2 * KEYS, 16  # bytes of a row of scores of a head, and between the rows of two heads


def why_not(spec: Spec, target: Target) -> str:
    """Return the reason why no kernels mix the heads of a spec on the chip; empty if there are some."""
    stages = Stages(spec)
    if not spec.mixed:
        return "no heads mix"
    if others := [name for name in _OTHERS if getattr(spec, name)]:
        return f"kernels that mix heads on the chip lack {', '.join(others)}"
    if stages.heads > MAX_HEADS or stages.post_is_separate:
        return f"at most {MAX_HEADS} heads mix with each other on the chip"
    if any(d > MAX_DIM or d % 16 for d in (spec.head_dim, spec.value_head_dim)):
        return f"heads mix on the chip at head dims up to {MAX_DIM} in multiples of 16"
    if spec.dtype not in DTYPES or "wgmma" not in target.matrix:
        return f"heads mix on the chip in {' and '.join(DTYPES)} on sm_90a"
    return ""


class OnChip(ABC):
    """A kernel whose CTAs take a block of rows of a bundle of heads.

    Attributes:
        spec: the request.
        target: name of the target.
        role: the kernel's role in the pass.
        rows: rows of a block.
        row_warps: warps that own rows.
        registers: registers of a thread of each kind of warps, in the order of their numbers.
    """

    spec: Spec
    target: str
    rows: ClassVar[int]
    row_warps: ClassVar[int]
    registers: ClassVar[tuple[int, ...]]
    tile_keys: ClassVar[int] = KEYS
    head_warps: ClassVar[int] = HEAD_WARPS

    @property
    def stages(self) -> Stages:
        """The stages that the kernels compute."""
        return Stages(self.spec)

    @property
    def sequence(self) -> StripSequence:
        """Which keys a query sees."""
        return StripSequence(self.spec, decodes=False)

    @property
    @abstractmethod
    def formula(self) -> Iterator[str]:
        """Lines of the source's comment about the results."""

    @property
    def offset(self) -> str:
        """The kernel's expression for the distance from a query's number to its position."""
        return "n_k - n_q"

    @property
    def comment(self) -> Iterator[str]:
        """Lines of the source's comment."""
        yield f"S = scale q k^T, {'C = M S over the heads of a group' if self.stages.mix else 'C = S'},"
        yield from self.formula
        yield f"Mask {Mask.of(self.spec).name}; query i sits at position i + {self.offset}."
        yield f"A bundle is {self.stages.heads} heads, which mix with each other only."
        yield "Strides count elements. `group` heads of q read the same head of k and v. Other tensors are contiguous."

    # ---- The launch

    def strides(self, tensor: str) -> tuple[Argument, ...]:
        """Return the arguments for the strides of a tensor (B, H, N, D), without the last."""
        return strides(tensor)

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

    # ---- A CTA

    @property
    @abstractmethod
    def warps(self) -> tuple[int, ...]:
        """Number of warps of each kind, in the order of their numbers."""

    @property
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
        return MAX_HEADS * (self.rows * LINE + LINE_GAP)

    def tiles(self, width: int) -> int:
        """Return the bytes of a tile of keys or values of all heads."""
        return MAX_HEADS * swizzled_bytes(KEYS, width)

    @property
    def summary(self) -> str:
        """The kernel's line in the plan's table."""
        warps, size = " + ".join(map(str, self.warps)), self.shared.size // 1024
        return f"CUDA, {self.stages.heads} heads of {self.rows} rows, tiles of {KEYS} keys, {warps} warps, {size} KiB"
