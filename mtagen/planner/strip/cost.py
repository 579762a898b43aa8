"""The cost model of strips: a kernel's multiprocessor cycles per score of each head that a row
sees.

A kernel streams planes from and to memory, and moves each element between shared memory and
registers, where tensor cores multiply. The longer of the two hides most of the other. A CTA has no
loads in flight when it starts, and when its warps wait for each other. Other CTAs of the
multiprocessor fill these gaps, if there are any. At the end of a launch CTAs end one by one; the
shorter a CTA's range of keys, the earlier they end. The constants were fitted to the times of
kernels on an H200 in ``benchmarks/notes/strips.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..targets import Target
from .kernels import SUMS

MEAN_ROW, LONGEST_ROW = 4096, 8192  # mean and largest number of keys that causal rows see in the measurements
STRIP_ROWS, _STRIP_HEADS = 1024, 16  # rows of a strip and heads in the measurements
START, DRAIN = 4500, 1000  # cycles without loads in flight: at a CTA's start, and when its warps wait for each other
_STREAMED = 0.85  # fraction of the memory's peak rate that a copy reaches
_MOVE = 0.1  # cycles to move an element between shared memory and registers, and to compute on it
_HEAD_PRODUCT = 0.03  # cycles per score of a product of heads with heads, whose operands are transposed
_SHARPNESS = 4  # order of the norm that combines memory's time and a multiprocessor's time
_ALONE = 0.3  # relative slowdown of a single warp, which waits for its own results
_HELD = 0.1  # relative slowdown with half the registers that the compiler asks for
_TAIL = 0.25  # fraction of the last CTAs' time in which other multiprocessors are idle


@dataclass(frozen=True)
class Work:
    """The properties of a kernel that the cost model uses.

    Attributes:
        traffic: bytes that are read and written per score.
        moved: elements that are moved between shared memory and registers per score.
        warps, ctas: computing warps of a CTA, and resident CTAs per multiprocessor.
        scores: scores that a CTA computes, or those of one row if it owns several.
        tensor: cycles of the tensor cores per score.
        head_products: number of products of heads with heads, which sum over keys.
        registers: registers of a thread that the compiler asks for.
        gap: cycles in which the CTA has no loads in flight, over all its scores.
        setup: cycles of a CTA before its first score.
        even: whether the CTAs of a launch end together, because the longest start first.
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
        """Return the modelled cycles per score."""
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
    """Return the cycles per score of a kernel, or of cuBLAS's product, if memory is the only bound."""
    planes = _PLANES.get(role, _PLANES.get(role.removeprefix("decode_"), 2))
    return planes * itemsize / (_STREAMED * target.dram_bytes_per_cycle)


# Number of planes that kernels read and write. A plane that is read twice counts twice. The default is 2.
_PLANES = {"scores": 1, "grad_shares": 1, "values": 1, "softmax": 3, "post_mix_backward": 4, "softmax_backward": 6}
_PLANES |= {"mix_backward": 3, "decode_statistics": 1, "decode_softmax": 2}
_PLANES |= dict.fromkeys(("outputs", "grad_queries", "grad_keys", "grad_values"), 1)
_PLANES |= dict.fromkeys(SUMS, 0)
