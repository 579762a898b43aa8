"""The gradient of a convolution's weight on the tensor cores: which products make it, and which warps."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Block: TypeAlias = "tuple[int, int]"  # (u, d): row shift, chunk of the window


class Operand(NamedTuple):
    """Two 8x8 blocks of transposed scores in an operand of an mma.

    Attributes:
        u: row shift of the first.
        u2: row shift of the second; -1 without one.
        apart: chunks from the first to the second.
    """

    u: int
    u2: int
    apart: int


class WeightGradient(NamedTuple):
    """How warps share the gradient of W: by row shifts, then by row tiles.

    An mma multiplies two 8x8 blocks (u, d) of transposed scores (row shift u, chunk d of a window) by 8 columns of G;
    its diagonals are the gradients of W[u].

    Attributes:
        shifts: row shifts of a warp.
        sets: sets of row shifts; the warps that have the same set share the row tiles of a step.
        chunks: chunks of a window.
        loaded: scores are elements in shared memory already, and an ldmatrix gives an operand as it is multiplied, but
            for those whose blocks are chunks apart. There are three row shifts then, and the operand of row shifts 0
            and 2 has the words of all, of which the one of row shift 1 is made.
        products: the pairs of blocks. If the last block is left over, its partner is one that has been paired before,
            and whose second sums do not count: the operand is then that of the next chunk's first pair.
    """

    shifts: int
    sets: int
    chunks: int
    loaded: bool
    products: tuple[tuple[Block, Block | None], ...]

    @property
    def sums(self) -> tuple[tuple[int, int, int, int], ...]:
        """(u, d, product, half of its rows) of the blocks whose sums count, each once."""
        places: dict[Block, tuple[int, int]] = {}
        for product, pair in enumerate(self.products):
            for half, block in enumerate(pair):
                if block:
                    places.setdefault(block, (product, half))
        return tuple((*block, *place) for block, place in places.items())

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of products, each once."""
        return tuple(dict.fromkeys(_operand(*blocks) for blocks in self.products))

    @property
    def terms(self) -> tuple[tuple[int, int], ...]:
        """Of each product the place of its operand, and the chunk of a window that has the first block."""
        return tuple((self.operands.index(_operand(*blocks)), blocks[0][1]) for blocks in self.products)

    @property
    def loads(self) -> int:
        """ldmatrix.x4 for the matrices of a chunk."""
        return -(-(self.shifts + 1) // 4)

    def registers(self, ahead: int) -> int:
        """Registers of a thread for sums, and for operands that are loaded so many chunks ahead of their products."""
        made = sum(operand.apart for operand in self.operands)  # operands, for which one more chunk of words is kept
        scores = 4 * ((len(self.operands) - made) * (1 + made + ahead) + made)
        return 4 * len(self.products) + scores + 2 * (self.chunks + ahead)


def _operand(first: Block, second: Block | None) -> Operand:
    return Operand(first[0], second[0], second[1] - first[1]) if second else Operand(first[0], -1, 0)


def weight_gradient(cq: int, chunks: int, sets: int = 1, loaded: bool = False) -> WeightGradient:
    """The gradient of W with at most four row shifts a warp, in at least so many sets.

    Operands are ``loaded`` only where there are several sets, each of which would have to convert the scores.
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
    return WeightGradient(shifts, sets, chunks, loaded, tuple(products))
