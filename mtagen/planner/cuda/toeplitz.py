"""The convolution as a product with a banded Toeplitz matrix, on the tensor cores.

A score tile in shared memory ("slab") holds rows of scores in 16-byte chunks of 8 columns; even
rows are stored apart from odd rows. Column n of the outputs reads columns n to n+ck-1 of the slab,
so 8 output columns need a window of ck+7 columns. Row shift u of the filter is a shift of the
slab's rows. For one row shift u and one chunk the product is

    out[16 rows, 8 columns] += slab[rows + u, chunk] x T,     T[k, n] = W[u, 8 d + k - n],

where d is the chunk's place in the window. It fills 8 of the 16 inner columns of an
``mma.m16n8k16``, so two such products share one instruction: k 0..7 are one row shift, k 8..15
another.

Rows are interleaved: row r of the A operand, r < 8, is row 2 r of the 16, and row r+8 is row 2 r+1.
Matrix s of a chunk is its rows 2 r + s. The operand's four matrices for shifts (u, u') are then (u,
u + 1, u', u' + 1), and all shifts together need only cq+1 different matrices of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from ...errors import PlanError, explain

MAX_ROWS = 16  # cq - 1 halo rows come from one neighbouring warp of 16 rows
MAX_COLUMNS = 17  # a window of ck + 7 <= 24 columns is 3 chunks
CHUNK = 8  # columns in 16 bytes
FLOP_OF_MMA = 2 * 16  # flop of an mma.m16n8k16 for each of its 16 x 8 outputs
SCORE_EXPONENT = 8  # slabs hold q.k 2^-8, so fp16 reaches to 1.6e7, and scores that underflow are below 2^-17

Taps: TypeAlias = tuple[int, int]  # (u, d): row shift and place of the chunk in the window
ZEROS: Taps = (-1, 0)


class Product(NamedTuple):
    """One mma into the tile ``behind`` chunks before the current one; lo and hi are the halves of its B operand."""

    behind: int
    lo: Taps
    hi: Taps


@dataclass(frozen=True)
class Quad:
    """Four 8 x 8 matrices, the A operand of ``products``.

    Attributes:
        matrices: (s, back) for each: matrix s of the chunk ``back`` chunks before the current one.
        products: the products that have this operand.
        copies: (quad, place) in that chunk of registers that already hold each matrix; empty if
            ldmatrix loads them.
    """

    matrices: tuple[tuple[int, int], ...]
    products: tuple[Product, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def reaches_back(self) -> bool:
        """Whether any matrix is of an earlier chunk."""
        return any(back for _, back in self.matrices)

    @property
    def sources(self) -> tuple[tuple[int, int, int], ...]:
        """The (quad, chunks back, place) of each matrix of a quad made by copies."""
        return tuple((q, back, place) for (q, place), (_, back) in zip(self.copies, self.matrices, strict=True))


class Step(NamedTuple):
    """One mma in the processing of a pair of chunks.

    Attributes:
        tile: output tile, counted from the pair's first chunk.
        operand: the A operand: number of a quad or, after the quads, of a gather.
        chunk: the chunk of the pair, 0 or 1, that the operand belongs to; a gather belongs to its
            tile's first.
        fragment: number of the B operand.
    """

    tile: int
    operand: int
    chunk: int
    fragment: int


@dataclass(frozen=True)
class Toeplitz:
    """The products that apply a (cq, ck) filter to a slab.

    Attributes:
        cq, ck: extent over rows and columns, cq <= 16, ck <= 17.
        pairs: whether the window's last one or two columns, of all row shifts, are gathered into
            mma's of their own (8 shifts each) instead of a chunk per shift.
    """

    cq: int
    ck: int
    pairs: bool

    @property
    def pointwise(self) -> bool:
        """Whether the filter has a single tap, so that scores are convolved in their registers."""
        return self.cq == self.ck == 1

    @property
    def window(self) -> int:
        """Number of columns of a slab that 8 output columns read."""
        return self.ck + CHUNK - 1

    @property
    def chunks(self) -> int:
        """Number of chunks of a window that are multiplied whole."""
        return self.window // CHUNK if self.pairs else -(-self.window // CHUNK)

    @property
    def carry(self) -> int:
        """Columns of the tile before at the beginning of a slab: ck - 1, rounded up to chunks."""
        return -(-(self.ck - 1) // CHUNK) * CHUNK

    @property
    def gathers(self) -> int:
        """Number of mma's per tile for the window's last pair of columns."""
        return -(-self.cq // CHUNK) if self.pairs else 0

    @property
    def mma_per_tile(self) -> int:
        """Number of mma.m16n8k16 per output tile of 16 x 8."""
        return sum(len(quad.products) for quad in self.quads) + self.gathers

    @property
    def mma_of_scores(self) -> int:
        """Number of mma.m16n8k16 to convolve 16 x 8 scores: none if a single tap multiplies
        registers.
        """
        return 0 if self.pointwise else self.mma_per_tile

    @cached_property
    def quads(self) -> tuple[Quad, ...]:
        """The A operands of one chunk.

        Row shifts are paired, first (u, u+2) and (u+1, u+3), which together need the matrices u ..
        u+4.
        """
        quads: list[Quad] = []
        u = 0
        while self.cq - u >= 3:
            quads.append(self._rows(u, u + 2))
            if self.cq - u == 3:
                quads.append(self._single(u + 1))
            else:
                quads.append(self._rows(u + 1, u + 3))
            u += min(4, self.cq - u)
        if self.cq - u == 2:
            quads.append(self._rows(u, u + 1))
        elif self.cq - u == 1:
            quads.append(self._single(u))
        return _with_copies(quads)

    def _rows(self, lo: int, hi: int) -> Quad:
        """Return the quad of two row shifts of the same chunk."""
        products = tuple(Product(d, (lo, d), (hi, d)) for d in range(self.chunks))
        return Quad(((lo, 0), (lo + 1, 0), (hi, 0), (hi + 1, 0)), products)

    def _single(self, u: int) -> Quad:
        """Return the quad of one row shift, with two chunks of a window in one mma."""
        if self.chunks == 1:
            return Quad(((u, 0), (u + 1, 0), (u, 0), (u + 1, 0)), (Product(0, (u, 0), ZEROS),))
        last = tuple(Product(2, ZEROS, (u, 2)) for _ in range(self.chunks - 2))
        return Quad(((u, 1), (u + 1, 1), (u, 0), (u + 1, 0)), (Product(1, (u, 0), (u, 1)), *last))

    @cached_property
    def fragments(self) -> tuple[tuple[Taps, Taps], ...]:
        """The distinct B operands, (lo, hi)."""
        distinct = {(product.lo, product.hi): None for quad in self.quads for product in quad.products}
        return tuple(distinct)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The mma's of a pair of chunks, in an order that keeps those of one accumulator far apart."""
        waiting = [
            Step(chunk - product.behind, q, chunk, self.fragments.index((product.lo, product.hi)))
            for q, quad in enumerate(self.quads)
            for chunk in (0, 1)
            for product in quad.products
        ]
        waiting += [
            Step(tile, len(self.quads) + gather, tile, len(self.fragments) + gather)
            for gather in range(self.gathers)
            for tile in (0, 1)
        ]
        ordered: list[Step] = []
        while waiting:
            last = {step.tile: place for place, step in enumerate(ordered)}
            step = min(waiting, key=lambda step: last.get(step.tile, -1))
            waiting.remove(step)
            ordered.append(step)
        return tuple(ordered)

    @property
    def loads(self) -> tuple[int, ...]:
        """Numbers of the quads that ldmatrix loads."""
        return tuple(q for q, quad in enumerate(self.quads) if not quad.copies)

    @property
    def copied(self) -> tuple[int, ...]:
        """Numbers of the quads that are copied from registers of other quads."""
        return tuple(q for q, quad in enumerate(self.quads) if quad.copies)

    @property
    def backs(self) -> tuple[tuple[int, int], ...]:
        """Distances in chunks from the lower and the upper half of each A operand's columns to the
        current chunk.
        """
        quads = tuple((quad.matrices[0][1], quad.matrices[2][1]) for quad in self.quads)
        return quads + ((-self.chunks, -self.chunks),) * self.gathers

    @property
    def matrix_words(self) -> tuple[str, ...]:
        """The s of each load's four matrices as the bytes of a word, the first in the lowest byte."""
        return tuple(_word(s for s, _ in self.quads[q].matrices) for q in self.loads)

    @property
    def back_words(self) -> tuple[str, ...]:
        """The chunk distances of each load's four matrices as the bytes of a word, the first in the
        lowest.
        """
        return tuple(_word(back for _, back in self.quads[q].matrices) for q in self.loads)

    @property
    def reaches_back(self) -> bool:
        """Whether any load takes matrices of an earlier chunk."""
        return any(self.quads[q].reaches_back for q in self.loads)

    @property
    def registers(self) -> int:
        """Number of registers that hold the B operands."""
        return 2 * (len(self.fragments) + self.gathers)


def supports_filter(cq: int, ck: int) -> bool:
    """Return whether score tiles have a halo for a (cq, ck) filter."""
    return cq <= MAX_ROWS and ck <= MAX_COLUMNS


def check_filter(cq: int, ck: int) -> None:
    """Check the extents of a filter.

    Raises:
        PlanError: the filter is larger than the halo of a score tile.
    """
    if not supports_filter(cq, ck):
        legal = f"cq <= {MAX_ROWS} and ck <= {MAX_COLUMNS} for cuda, min(cq, ck) <= 16 for triton"
        raise PlanError(explain("kernel", (cq, ck), "is larger than the halo of a score tile", legal))


def toeplitz(cq: int, ck: int, *, pairs: bool = True) -> Toeplitz:
    """Return the products for a (cq, ck) filter with the fewest mma's.

    ``pairs=False`` excludes gathered columns.

    Raises:
        PlanError: the filter is larger than the halo of a score tile.
    """
    check_filter(cq, ck)
    candidates = [Toeplitz(cq, ck, False)]
    if pairs and (ck + CHUNK - 1) % CHUNK in (1, 2) and ck > 1:
        candidates.append(Toeplitz(cq, ck, True))
    return min(candidates, key=lambda candidate: (candidate.mma_per_tile, candidate.pairs))


def _word(values: Iterable[int]) -> str:
    return f"0x{sum(value << 8 * place for place, value in enumerate(values)):08x}"


def _with_copies(quads: Sequence[Quad]) -> tuple[Quad, ...]:
    """Copy quads from registers if other quads, which ldmatrix loads, hold all their matrices."""
    result = list(quads)
    # The last quads are tried first, because a group's second quad is contained in its first and the next group's.
    for q in reversed(range(len(result))):
        loaded = {
            matrix: (other, place)
            for other, quad in enumerate(result)
            if other != q and not quad.copies
            for place, (matrix, back) in enumerate(quad.matrices)
            if back == 0
        }
        if all(matrix in loaded for matrix, _ in result[q].matrices):
            copies = tuple(loaded[matrix] for matrix, _ in result[q].matrices)
            result[q] = Quad(result[q].matrices, result[q].products, copies)
    return tuple(result)
