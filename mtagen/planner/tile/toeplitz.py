"""The convolution as a product with a banded Toeplitz matrix: which tensor-core products make it, of which fragments.

A slab holds rows of scores in shared memory, even rows apart from odd ones, in 16-byte chunks of 8 columns. Column n
of the outputs reads columns n to n+ck-1 of the slab, so a tile of 8 output columns needs a window of ck+7 columns; row
shift u of the kernel is a shift of the slab's rows. For one row shift u and one chunk the product is

    out[16 rows, 8 columns] += slab[rows + u, chunk] x T,     T[k, n] = W[u, 8 d + k - n],

d being the chunk's place in the window: 8 of the 16 inner columns of an ``mma.m16n8k16``. Two such products share one
instruction: its k 0..7 is one row shift, its k 8..15 another.

Rows are interleaved: row r of the A operand, r < 8, is row 2 r of the 16, and row r+8 is row 2 r+1. Matrix s of a chunk
is its rows 2 r + s; the operand's four matrices for shifts (u, u') are then (u, u + 1, u', u' + 1), and all shifts
together need only cq+1 different matrices of a chunk.
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
SCORE_EXPONENT = 8  # slabs hold q.k 2^-8: fp16 then reaches to 1.6e7, and what underflows is below 2^-17

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
        matrices: (s, back) each: matrix s of the chunk ``back`` chunks before the current one.
        copies: where each matrix already is, as (quad, place) in that chunk; empty if ldmatrix loads the quad.
        products: what it is multiplied into.
    """

    matrices: tuple[tuple[int, int], ...]
    products: tuple[Product, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def reaches_back(self) -> bool:
        """Whether some matrix is of an earlier chunk."""
        return any(back for _, back in self.matrices)

    @property
    def sources(self) -> tuple[tuple[int, int, int], ...]:
        """(quad, chunks back, place) of each matrix of a quad made by copies."""
        return tuple((q, back, place) for (q, place), (_, back) in zip(self.copies, self.matrices, strict=True))


class Step(NamedTuple):
    """One mma while a pair of chunks is worked on.

    Attributes:
        tile: output tile, counted from the pair's first chunk.
        operand: its A operand: one of the quads or, counted on from them, one of the gathers.
        chunk: the pair's chunk, 0 or 1, that the operand is of; a gather is of its tile's first.
        fragment: its B operand.
    """

    tile: int
    operand: int
    chunk: int
    fragment: int


@dataclass(frozen=True)
class Toeplitz:
    """How a (cq, ck) kernel is applied to a slab.

    Attributes:
        cq, ck: extent over rows and columns, cq <= 16, ck <= 17.
        pairs: the window's last one or two columns, of all row shifts at once, are gathered into mma's of their own
            (8 shifts each) instead of a chunk per shift.
    """

    cq: int
    ck: int
    pairs: bool

    @property
    def pointwise(self) -> bool:
        """Whether there is one tap only, and scores need not leave their registers to be convolved."""
        return self.cq == self.ck == 1

    @property
    def window(self) -> int:
        """Columns of a slab that 8 output columns read."""
        return self.ck + CHUNK - 1

    @property
    def chunks(self) -> int:
        """Chunks of a window that are multiplied whole."""
        return self.window // CHUNK if self.pairs else -(-self.window // CHUNK)

    @property
    def carry(self) -> int:
        """Columns of the tile before that a slab starts with: ck - 1, rounded up to chunks."""
        return -(-(self.ck - 1) // CHUNK) * CHUNK

    @property
    def gathers(self) -> int:
        """mma's a tile for the window's last pair of columns."""
        return -(-self.cq // CHUNK) if self.pairs else 0

    @property
    def mma_per_tile(self) -> int:
        """mma.m16n8k16 for an output tile of 16 x 8."""
        return sum(len(quad.products) for quad in self.quads) + self.gathers

    @property
    def mma_of_scores(self) -> int:
        """The same where it convolves scores: none if one tap multiplies them in registers."""
        return 0 if self.pointwise else self.mma_per_tile

    @cached_property
    def quads(self) -> tuple[Quad, ...]:
        """The A operands of one chunk. Row shifts go in pairs, first (u, u+2) and (u+1, u+3): matrices u .. u+3."""
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
        """Two row shifts of the same chunk."""
        products = tuple(Product(d, (lo, d), (hi, d)) for d in range(self.chunks))
        return Quad(((lo, 0), (lo + 1, 0), (hi, 0), (hi + 1, 0)), products)

    def _single(self, u: int) -> Quad:
        """One row shift: two chunks of a window in one mma."""
        if self.chunks == 1:
            return Quad(((u, 0), (u + 1, 0), (u, 0), (u + 1, 0)), (Product(0, (u, 0), ZEROS),))
        last = tuple(Product(2, ZEROS, (u, 2)) for _ in range(self.chunks - 2))
        return Quad(((u, 1), (u + 1, 1), (u, 0), (u + 1, 0)), (Product(1, (u, 0), (u, 1)), *last))

    @cached_property
    def fragments(self) -> tuple[tuple[Taps, Taps], ...]:
        """The distinct B operands, (lo, hi)."""
        seen = {(product.lo, product.hi): None for quad in self.quads for product in quad.products}
        return tuple(seen)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The mma's of a pair of chunks, ordered so that those into one accumulator are far apart."""
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
        """Quads that ldmatrix loads."""
        return tuple(q for q, quad in enumerate(self.quads) if not quad.copies)

    @property
    def copied(self) -> tuple[int, ...]:
        """Quads that are made of matrices which others have."""
        return tuple(q for q, quad in enumerate(self.quads) if quad.copies)

    @property
    def backs(self) -> tuple[tuple[int, int], ...]:
        """Chunks from those of each A operand's columns, of the lower and the upper half of k, to the current one."""
        quads = tuple((quad.matrices[0][1], quad.matrices[2][1]) for quad in self.quads)
        return quads + ((-self.chunks, -self.chunks),) * self.gathers

    @property
    def matrix_words(self) -> tuple[str, ...]:
        """The s of each load's four matrices as the bytes of a word, the first lowest."""
        return tuple(_word(s for s, _ in self.quads[q].matrices) for q in self.loads)

    @property
    def back_words(self) -> tuple[str, ...]:
        """The chunk distances of each load's four matrices as the bytes of a word, the first lowest."""
        return tuple(_word(back for _, back in self.quads[q].matrices) for q in self.loads)

    @property
    def reaches_back(self) -> bool:
        """Whether some load takes matrices of an earlier chunk."""
        return any(self.quads[q].reaches_back for q in self.loads)

    @property
    def registers(self) -> int:
        """Registers that hold the B operands."""
        return 2 * (len(self.fragments) + self.gathers)


def toeplitz(cq: int, ck: int, *, pairs: bool = True) -> Toeplitz:
    """How a (cq, ck) kernel takes the fewest mma's; ``pairs=False`` where a slab keeps no gathered columns.

    Raises:
        PlanError: the kernel is larger than a slab's halo.
    """
    if cq > MAX_ROWS or ck > MAX_COLUMNS:
        legal = f"cq <= {MAX_ROWS} and ck <= {MAX_COLUMNS} for cuda, min(cq, ck) <= 16 for triton"
        raise PlanError(explain("kernel", (cq, ck), "is larger than the halo of a score tile", legal))
    candidates = [Toeplitz(cq, ck, False)]
    if pairs and (ck + CHUNK - 1) % CHUNK in (1, 2) and ck > 1:
        candidates.append(Toeplitz(cq, ck, True))
    return min(candidates, key=lambda candidate: (candidate.mma_per_tile, candidate.pairs))


def _word(values: Iterable[int]) -> str:
    return f"0x{sum(value << 8 * place for place, value in enumerate(values)):08x}"


def _with_copies(quads: Sequence[Quad]) -> tuple[Quad, ...]:
    """Make quads from registers where others, loaded by ldmatrix, hold their matrices already."""
    made = list(quads)
    # The last candidates first: a block's second quad lies inside its first and the next block's.
    for q in reversed(range(len(made))):
        loaded = {
            matrix: (other, place)
            for other, quad in enumerate(made)
            if other != q and not quad.copies
            for place, (matrix, back) in enumerate(quad.matrices)
            if back == 0
        }
        if all(matrix in loaded for matrix, _ in made[q].matrices):
            copies = tuple(loaded[matrix] for matrix, _ in made[q].matrices)
            made[q] = Quad(made[q].matrices, made[q].products, copies)
    return tuple(made)
