"""The gradient of a convolution's weight on the tensor cores: which products make it, and which warps."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Block: TypeAlias = "tuple[int, int]"  # (u, d): row shift, chunk of the window
MAX_SHIFTS = 4  # row shifts that a warp has at most


class WeightGradient(NamedTuple):
    """How warps share the gradient of W: by row shifts, then by row tiles.

    An mma multiplies two 8x8 blocks (u, d) of transposed scores (row shift u, chunk d of a window) by 8 columns of G;
    its diagonals are the gradients of W[u].

    Attributes:
        shifts: row shifts of a warp.
        sets: sets of row shifts; the warps that have the same set share the row tiles of a step.
        chunks: chunks of a window.
        products: the pairs of blocks. If the last block is left over, its partner is one that has been paired before,
            and whose second sums do not count: the operand is then that of the next chunk's first pair.
    """

    shifts: int
    sets: int
    chunks: int
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
    def operands(self) -> tuple[tuple[int, int, int, int], ...]:
        """(u, d, u', d') of each product; u' = -1 where there is no second block."""
        return tuple((*first, *(second or (-1, 0))) for first, second in self.products)

    @property
    def loads(self) -> int:
        """ldmatrix.x4 for the matrices of a chunk."""
        return -(-(self.shifts + 1) // 4)

    @property
    def early_row_tiles(self) -> int:
        """Of a warp's row tiles, those worked on before the next step's scores are stored."""
        return -(-self.sets // 2)


def weight_gradient(cq: int, chunks: int, sets: int = 1) -> WeightGradient:
    """The gradient of W with at most ``MAX_SHIFTS`` row shifts a warp, in at least so many sets."""
    sets = max(sets, 1 if cq <= 3 else 2 if cq <= 8 else 4)
    shifts = -(-cq // sets)
    products: list[tuple[Block, Block | None]] = [
        ((u, d), (u + 1, d)) for u in range(0, shifts - 1, 2) for d in range(chunks)
    ]
    if shifts % 2:
        last = shifts - 1
        starts = [*range(0, chunks - 1, 2), *([chunks - 2] if chunks % 2 and chunks > 1 else [])]
        products += [((last, d), (last, d + 1)) for d in starts] or [((last, 0), None)]
    return WeightGradient(shifts, sets, chunks, tuple(products))
