"""The sums of partial sums at the end of a backward pass of strips. One kernel computes all of them.

Programs of the other kernels sum gradients of weights, and of factors of keys, over their own rows or keys. Each such
part has a place of its own in a buffer, so no atomics are needed, and results are bit-reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from sympy import Min, ceiling, floor

from ..geometry.affine import N_K, Size
from ..sizes import BATCH, N_HEADS
from .stages import Stages, TokenMixture, block_of

ROLE = "gradient_sums"
TILE = 2048  # partial sums that a program adds at once: some of its results, some parts of each
# Parts of that tile. Few results have many parts; factors of keys are many results with few parts.
MATRIX_PARTS, TAP_PARTS, FACTOR_PARTS = 128, 32, 4

# Sizes in host code: the parts of rows and the chunks of keys that each have a sum for a convolution's gradient
PARTS, ALL_CHUNKS = sympy.symbols("parts all_chunks", integer=True, positive=True)
SLOT, ENTRY = sympy.symbols("slot entry", integer=True, nonnegative=True)  # of a program's results, in the kernel


@dataclass(frozen=True)
class GradientSum:
    """One sum: result[slot, entry] = sum over o and i of partial[o, slot, i, place of the entry], in fp32.

    Attributes:
        partial: name of the buffer of partial sums, (outer, slots, inner, entries).
        of: name of the tensor whose gradient is the result.
        shape: shape of the result.
        outer, slots, inner: extents of the buffer.
        entries: partial sums of a slot and part.
        results: results of a slot; of the last slot maybe fewer.
        end: the same, of the slot ``SLOT``.
        place: the place of the result ``ENTRY`` of a slot among ``entries``.
        parts: parts of a tile.
    """

    partial: str
    of: str
    shape: tuple[Size, ...]
    outer: Size
    slots: Size
    inner: Size
    entries: Size
    results: Size
    end: Size
    place: Size
    parts: int

    @property
    def result(self) -> str:
        """Name of the result."""
        return f"d_{self.of}"

    @property
    def buffer(self) -> tuple[Size, ...]:
        """Shape of the buffer."""
        return self.outer, self.slots, self.inner, self.entries

    @property
    def block(self) -> int:
        """Results of a program."""
        return TILE // self.parts

    @property
    def blocks(self) -> Size:
        """Programs of a slot."""
        return ceiling(self.results / self.block)

    @property
    def programs(self) -> Size:
        """Programs of the sum."""
        return self.slots * self.blocks

    @property
    def sizes(self) -> frozenset[str]:
        """Names of the sizes that the kernel needs."""
        used = sympy.Tuple(*self.buffer, self.results, self.end).free_symbols - {SLOT}
        return frozenset(size.name for size in used)


def gradient_sums(stages: Stages, programs: int) -> tuple[GradientSum, ...]:
    """Return the sums of a backward pass.

    Args:
        stages: the stages of the pipeline.
        programs: programs per bundle of heads, each with partial sums of gradients of matrices.
    """
    return tuple(_sums(stages, programs))


def sizes_of(sums: tuple[GradientSum, ...]) -> tuple[str, ...]:
    """Return the names of the sizes that the kernel of these sums needs."""
    return tuple(sorted({name for one in sums for name in one.sizes}))


def _sums(stages: Stages, programs: int) -> Iterator[GradientSum]:
    weights = {stage.partial: stage for stage in stages.token_mixes}
    mixtures = {"mix_partial": stages.mix, "post_mix_partial": stages.post_mix}
    for partial, heads in stages.matrix_partials.items():
        stage = weights.get(partial) or mixtures[partial]
        assert stage
        yield _of_matrices(partial, stage.weight, stage.heads, heads, programs)
    for convolution in stages.convolutions:
        taps = convolution.cq * convolution.ck
        partial, shape = f"{convolution.name}_partial", (N_HEADS, convolution.cq, convolution.ck)
        buffer = PARTS, N_HEADS, ALL_CHUNKS, taps
        yield GradientSum(partial, convolution.weight, shape, *buffer, taps, taps, ENTRY, TAP_PARTS)
    for mixture in stages.token_mixes:
        if mixture.rank:
            yield _of_factors(mixture)


def _of_matrices(partial: str, weight: str, mixed: int, heads: int, programs: int) -> GradientSum:
    """Return the sum of the gradients of matrices (H / mixed, mixed, mixed), which are blocks on the diagonals of
    those of bundles of heads, padded as on chip.
    """
    block, results = block_of(heads), heads * mixed
    place = ENTRY + floor(ENTRY / mixed) * (block - mixed)
    place += floor(ENTRY / mixed**2) * mixed if heads > mixed else 0
    shape = floor(N_HEADS / mixed), mixed, mixed
    buffer = BATCH, ceiling(N_HEADS / heads), programs, block**2
    end = Min(results, mixed * (N_HEADS - heads * SLOT))
    return GradientSum(partial, weight, shape, *buffer, results, end, place, MATRIX_PARTS)


def _of_factors(stage: TokenMixture) -> GradientSum:
    shape, factors = (BATCH, N_HEADS, N_K, stage.width), N_K * stage.width
    chunks = sympy.Symbol(stage.chunks, integer=True, positive=True)
    buffer = 1, BATCH * N_HEADS, chunks, factors
    return GradientSum(stage.key_partial, stage.key_factors, shape, *buffer, factors, factors, ENTRY, FACTOR_PARTS)
