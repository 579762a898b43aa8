"""The cost model of strips: multiprocessor cycles of a kernel for each score of each head that a row sees.

A kernel streams planes from memory and to memory, and moves each element through shared memory to registers, or back,
where tensor cores multiply. What takes longer hides most of the other. A CTA has nothing under way when it starts, and
where its warps wait for each other; other CTAs of the multiprocessor fill these gaps, if there are any. At the end of a
launch CTAs end one by one, the earlier the shorter their walks. The constants are fitted to the times of kernels that
``benchmarks/notes/strips.md`` gives for an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..targets import Target

MEAN_ROW, LONGEST_ROW = 4096, 8192  # keys that causal rows see where kernels were timed
STRIP_ROWS, _STRIP_HEADS = 1024, 16  # rows of a strip there, and heads
START, DRAIN = 4500, 1000  # cycles without loads under way: at a CTA's start, and where its warps wait for each other
_STREAMED = 0.85  # of the memory's peak rate, which a copy reaches
_MOVE = 0.1  # cycles to move an element between shared memory and registers, and to work on it there
_HEAD_PRODUCT = 0.03  # cycles of a score's share in a product of heads with heads, whose operands are transposed
_SHARPNESS = 4  # order of the norm that combines what memory takes and what a multiprocessor takes
_ALONE = 0.3  # by which the work of one warp, which waits for its own results, takes longer than that of many
_HELD = 0.1  # by which work takes longer with half the registers that the compiler asks for
_TAIL = 0.25  # of the time of the last CTAs in which others are idle


@dataclass(frozen=True)
class Work:
    """What the model wants to know of a kernel.

    Attributes:
        traffic: bytes that are read and written for a score.
        moved: elements that are moved between shared memory and registers for a score.
        warps, ctas: warps of a CTA that do the work, and CTAs that a multiprocessor holds.
        scores: scores that a CTA makes, or those of one row if it owns several.
        tensor: cycles of the tensor cores for a score.
        head_products: products of heads with heads, sums over keys.
        registers: registers of a thread that the compiler asks for.
        gap: cycles meanwhile in which the CTA has no loads under way.
        setup: cycles of work of a CTA before its first score.
        even: whether the CTAs of a launch end together, because it begins with the longest.
    """

    traffic: float
    moved: float
    warps: int
    ctas: int
    scores: float
    tensor: float = 0
    head_products: int = 0
    registers: int = 0
    gap: float = 0
    setup: float = 0
    even: bool = False

    def cycles(self, target: Target) -> float:
        """The modelled cost."""
        memory = self.traffic / (_STREAMED * target.dram_bytes_per_cycle)
        warps = self.warps * self.ctas
        missing = max(0.0, self.registers * target.warp_size * warps / target.registers_per_multiprocessor - 1)
        chip = _MOVE * self.moved + _HEAD_PRODUCT * self.head_products + self.tensor + self.setup / self.scores
        chip *= (1 + _ALONE / warps) * (1 + _HELD * missing)
        busy = math.pow(memory**_SHARPNESS + chip**_SHARPNESS, 1 / _SHARPNESS)
        idle = (self.gap / (self.ctas * self.scores * busy + self.gap)) ** self.ctas
        launched = _STRIP_HEADS * STRIP_ROWS * LONGEST_ROW / target.multiprocessors
        tail = 0 if self.even else _TAIL * self.ctas * self.scores / launched
        return busy / (1 - idle) * (1 + tail)


def streamed(role: str, itemsize: int, target: Target) -> float:
    """What memory alone costs a kernel, or a product of a plane with rows, whoever makes it."""
    return _PLANES.get(role.removeprefix("decode_"), 2) * itemsize / (_STREAMED * target.dram_bytes_per_cycle)


# Planes that kernels read and write, one that is read twice counted twice; convolutions, and other mixtures, have 2.
_PLANES = {"scores": 1, "grad_shares": 1, "values": 1, "softmax": 3, "post_mix_backward": 4, "softmax_backward": 6}
_PLANES |= dict.fromkeys(("outputs", "grad_queries", "grad_keys", "grad_values"), 1)
