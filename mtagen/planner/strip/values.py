"""The CUDA kernel of the lowering "strip" that multiplies a decode step's probabilities by values.

The kernel reads all values once and little else, so keeping copies in flight is all that matters.
Each warp has its own ring of blocks and waits for other warps only at the end, when their sums are
added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sympy import ceiling

from ...spec import Spec
from ..cuda.memory import swizzled_bytes
from ..kernel import Kernel, numbers, reads, strides, writes
from ..sizes import B0, B1, GROUP, KV_HEADS, N_NEW, SPLITS
from .kernels import VALUE_ROWS
from .sequence import cache_arguments
from .source import DECODE, StripSource

WARPS = 4
BLOCK_KEYS = 16  # keys of a warp's block: the terms of an mma
MAX_CTAS = 3  # upper limit of resident CTAs per multiprocessor
MIN_DEPTH, MAX_DEPTH = 3, 4  # limits of a ring's blocks; MIN_DEPTH only if several CTAs are resident


@dataclass(frozen=True)
class ValuesKernel(StripSource):
    """The kernel of the product of probabilities with values.

    Attributes:
        spec: the request.
        target: name of the target.
    """

    spec: Spec
    target: str

    template = "plane_values.cu.j2"
    reads_cache = True

    @property
    def role(self) -> str:
        return f"{DECODE}values"

    @property
    def fits(self) -> bool:
        # Columns of values are rows of an mma, and one block is copied while another is used.
        return self.spec.value_head_dim % 16 == 0 and self.depth >= 2

    # ---- The division of the work

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return WARPS

    @property
    def rows(self) -> int:
        """Number of rows of probabilities of a CTA."""
        return VALUE_ROWS

    @property
    def keys(self) -> int:
        """Number of keys of a block."""
        return BLOCK_KEYS

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor: the largest whose rings have MIN_DEPTH
        blocks, else 1.
        """
        return next(ctas for ctas in range(MAX_CTAS, 0, -1) if ctas == 1 or self._depth(ctas) >= MIN_DEPTH)

    # ---- Shared memory

    @property
    def value_bytes(self) -> int:
        """Bytes of a block of values."""
        return swizzled_bytes(BLOCK_KEYS, self.spec.value_head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a ring: values, and the rows' probabilities."""
        return self.value_bytes + 2 * BLOCK_KEYS * VALUE_ROWS

    def _depth(self, ctas: int) -> int:
        return min(MAX_DEPTH, self.gpu.shared_of(ctas) // (WARPS * self.block_bytes))

    @property
    def depth(self) -> int:
        """Number of blocks of a ring: one is used while the others are copied."""
        return self._depth(self.ctas)

    @property
    def kernel(self) -> Kernel:
        arguments = (
            *reads("Element", "plane", "v"),
            *writes("float", "partial"),
            *writes("Element", "out"),
            *reads("int", "seqlens"),
            *cache_arguments(self.spec),
            *strides("v"),
            *numbers("int", "count", "keys", "pitch", "n_heads", "group", "b0", "n_new", "batch", "split"),
        )
        grid = ((B1 - B0) * KV_HEADS * SPLITS * ceiling(GROUP * N_NEW / VALUE_ROWS),)
        shared = WARPS * self.depth * self.block_bytes
        registers = self.gpu.registers_of(WARPS * self.ctas)
        return Kernel(self.role, self.name, arguments, grid, 32 * WARPS, shared, registers)

    @property
    def legend(self) -> Iterator[str]:
        yield "Outputs of a decode step, each a sum over the keys of one part:"
        yield "partial[part, b, h, n] = sum over j of plane[slot, count - n_new + n, j] v[b, h / group, j],"
        yield "where a part has `split` keys of the sequence, and the last part has the rest. A single part is out."

    @property
    def summary(self) -> str:
        blocks = f"blocks of {VALUE_ROWS} rows and {BLOCK_KEYS} keys"
        return f"CUDA, {blocks}, {WARPS} warps, rings of {self.depth} blocks"
