"""The gradient of a convolution's weight on the tensor cores: its products, and their division
among warps.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Block: TypeAlias = "tuple[int, int]"  # (u, d): row shift, chunk of the window


class Operand(NamedTuple):
    """Two 8x8 blocks of transposed scores in an operand of an mma.

    Attributes:
        u: row shift of the first.
        u2: row shift of the second; -1 if there is none.
        apart: distance in chunks from the first to the second.
    """

    u: int
    u2: int
    apart: int


class WeightGradient(NamedTuple):
    """The division of the gradient of W among warps: by row shifts, then by row tiles.

    An mma multiplies two 8x8 blocks (u, d) of transposed scores (row shift u, chunk d of a window)
    by 8 columns of G. The diagonals of the result are the gradients of W[u].

    Attributes:
        shifts: row shifts per warp.
        sets: number of sets of row shifts. Warps with the same set divide the row tiles of a step.
        chunks: chunks of a window.
        loaded: whether scores in shared memory are already elements, so that an ldmatrix loads an
            operand as it is multiplied. The exception is an operand whose blocks are chunks apart.
            There are three row shifts then, and the words of the operand of row shifts 0 and 2 give
            that of row shift 1.
        products: the pairs of blocks. A last block without a partner is paired with one that has
            been paired before. The second sums of that block are not used; the operand is then that
            of the next chunk's first pair.
        columns: first owned column of G in its tile, and the end of the owned columns.
        first_chunk: the chunk of S in which the window of G's first column begins, relative to the
            chunk of G.
    """

    shifts: int
    sets: int
    chunks: int
    loaded: bool
    products: tuple[tuple[Block, Block | None], ...]
    columns: tuple[int, int]
    first_chunk: int

    @property
    def sums(self) -> tuple[tuple[int, int, int, int], ...]:
        """The (u, d, product, half of its rows) of the blocks whose sums are used, each once."""
        places: dict[Block, tuple[int, int]] = {}
        for product, pair in enumerate(self.products):
            for half, block in enumerate(pair):
                if block:
                    places.setdefault(block, (product, half))
        return tuple((*block, *place) for block, place in places.items())

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The distinct operands of the products."""
        return tuple(dict.fromkeys(_operand(*blocks) for blocks in self.products))

    @property
    def terms(self) -> tuple[tuple[int, int], ...]:
        """For each product, the number of its operand, and the chunk of a window that has the first
        block.
        """
        return tuple((self.operands.index(_operand(*blocks)), blocks[0][1]) for blocks in self.products)

    @property
    def loads(self) -> int:
        """Number of ldmatrix.x4 for the matrices of a chunk."""
        return -(-(self.shifts + 1) // 4)

    def registers(self, ahead: int) -> int:
        """Return a thread's registers for sums, and for operands loaded ``ahead`` chunks before
        their products.
        """
        derived = sum(operand.apart for operand in self.operands)  # each needs the words of one more chunk
        scores = 4 * ((len(self.operands) - derived) * (1 + derived + ahead) + derived)
        return 4 * len(self.products) + scores + 2 * (self.chunks + ahead)


def _operand(first: Block, second: Block | None) -> Operand:
    return Operand(first[0], second[0], second[1] - first[1]) if second else Operand(first[0], -1, 0)


def weight_gradient(
    cq: int, chunks: int, columns: tuple[int, int], *, first_chunk: int = 0, sets: int = 1, loaded: bool = False
) -> WeightGradient:
    """Return the division of the gradient of W with at most four row shifts per warp, in ``sets``
    sets or more.

    Operands are ``loaded`` only if there are several sets, each of which would otherwise convert
    the scores.
    """
    sets = max(sets, 1 if cq <= 3 else 2 if cq <= 8 else 4)
    shifts, loaded = -(-cq // sets), loaded and sets > 1
    pairs, last = [(u, u + 1) for u in range(0, shifts - 1, 2)], shifts - 1
    if loaded and shifts == 3:
        pairs, last = [(0, 2)], 1
    products: list[tuple[Block, Block | None]] = [((u, d), (u2, d)) for u, u2 in pairs for d in range(chunks)]
    if shifts % 2:
        starts = [*range(0, chunks - 1, 2), *([chunks - 2] if chunks % 2 and chunks > 1 else [])]
        products += [((last, d), (last, d + 1)) for d in starts] or [((last, 0), None)]
    return WeightGradient(shifts, sets, chunks, loaded, tuple(products), columns, first_chunk)
