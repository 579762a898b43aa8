"""The templates' convolution and slabs on the machine of :mod:`tensor_cores`, driven by a plan's numbers alone.

Function by function what toeplitz.j2, slab.j2 and no_slab.j2 print; names are theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tensor_cores import LANES, Addresses, G, SharedMemory, T, Words, mma

from mtagen.planner.cuda.toeplitz import Step, Toeplitz
from mtagen.planner.tile.forward import TileForward

Taps = Callable[[int, int], float]


def in_word(word: str) -> NDArray[np.int64]:
    """The byte that a lane takes of a word with a byte for each matrix."""
    return int(word, 16) >> (LANES & 24) & 255


def matrix_of(toeplitz: Toeplitz, load: int) -> NDArray[np.int64]:
    """Which matrix each lane addresses."""
    return in_word(toeplitz.matrix_words[load])


def chunks_back(toeplitz: Toeplitz, load: int) -> NDArray[np.int64]:
    """Chunks from that of the matrix which each lane addresses to the current one."""
    return in_word(toeplitz.back_words[load])


def make_toeplitz(toeplitz: Toeplitz, taps: Taps) -> Words:
    """B operands (n, 2, 32, 2)."""

    def words(u: NDArray[np.int64], v: NDArray[np.int64]) -> Words:
        return np.array([[taps(x, y), taps(x, y + 1)] for x, y in zip(u.tolist(), v.tolist(), strict=True)])

    operands, offset = [], 2 * T - G
    for halves in toeplitz.fragments:
        operands.append([words(0 * T + u, 8 * d + offset) if u >= 0 else np.zeros((32, 2)) for u, d in halves])
    for gather in range(toeplitz.gathers):
        operands.append([words(8 * gather + half + 2 * T, 8 * toeplitz.chunks - G) for half in (0, 1)])
    return np.array(operands)


def load_triple(toeplitz: Toeplitz, shared: SharedMemory, word: Addresses, third: Addresses | int) -> Words:
    """Words of rows r, r + 1, r + 2 as an A operand."""
    if toeplitz.cq % 2:
        first, second = shared.load(word, 2)
        (last,) = shared.load(word + third)
    else:
        second, last = shared.load(word + 4, 2)
        (first,) = shared.load(word)
    return np.stack([first, second, second, last])


def gathered_rows(toeplitz: Toeplitz, above: Addresses) -> tuple[list[Addresses], Addresses]:
    """Each gather's words, and ``third`` of the last; ``above`` is the word of the first row that a lane reads."""
    halo = toeplitz.cq - 1
    rows = [above + 4 * (8 * x + np.minimum(2 * T, halo // 2 * 2 - 8 * x)) for x in range(toeplitz.gathers)]
    return rows, np.where(8 * (toeplitz.gathers - 1) + 2 * T < halo, 8, 4)


def convolve(
    toeplitz: Toeplitz,
    shared: SharedMemory,
    rows: list[Addresses],
    operands: Words,
    tiles: int,
    *,
    gathered: list[Addresses] = (),  # type: ignore[assignment]
    third: Addresses | int = 8,
    gather_stride: int = 0,
    position: Addresses | None = None,
    finish: Callable[[int, int], None] = lambda n, products: None,
) -> Words:
    """c (tiles, 2, 32, 2).

    Output row r of a lane's two sees columns of the slab up to ``position`` + r only, if that is given. ``finish`` is
    told of each finished tile and how many mma's it took.
    """
    chunks = tiles + toeplitz.chunks - 1
    c = np.zeros((tiles, 2, 32, 2))
    a: dict[tuple[int, int], Words] = {}  # (quad, chunk); registers that nothing has written are not there
    products: Counter[int] = Counter()

    def load(chunk: int) -> None:
        if chunk >= chunks:
            return
        for at, q in enumerate(toeplitz.loads):
            offset = 16 * (chunk - chunks_back(toeplitz, at)) if chunk else 0
            a[q, chunk] = shared.load_matrices(rows[at] + offset)
        if chunk >= tiles:
            return
        for x in range(toeplitz.gathers):
            last = x == toeplitz.gathers - 1
            word = gathered[x] + chunk * gather_stride
            a[len(toeplitz.quads) + x, chunk] = load_triple(toeplitz, shared, word, third if last else 8)

    def copy(chunk: int) -> None:
        for q, quad in enumerate(toeplitz.quads):
            if quad.copies and chunk < chunks and (chunk > 0 or not quad.reaches_back):
                a[q, chunk] = np.stack([a[source, chunk - back][place] for source, back, place in quad.sources])

    def multiply(m: int, step: Step) -> None:
        tile, chunk = m + step.tile, m + step.chunk
        if not 0 <= tile < tiles or chunk >= chunks:
            return
        seen = a[step.operand, chunk]
        if position is not None:
            pair = 2 * T if step.operand < len(toeplitz.quads) else 0 * T
            lo, hi = (8 * (chunk - back) + pair for back in toeplitz.backs[step.operand])
            column = np.stack([lo, lo, hi, hi])[..., None] + np.arange(2)
            row = np.array([0, 1, 0, 1])[:, None, None]
            seen = np.where(column > position[:, None] + row, 0, seen)
        mma(c[tile], seen, operands[step.fragment])
        products[tile] += 1

    def complete(m: int) -> None:
        for n in range(m - (toeplitz.chunks - 1), m + 2 - (toeplitz.chunks - 1)):
            if 0 <= n < tiles:
                finish(n, products[n])

    for m in range(0, chunks, 2):
        load(m), load(m + 1)
        copy(m), copy(m + 1)
        complete(m - 2)
        for step in toeplitz.steps:
            multiply(m, step)
    complete((chunks - 1) // 2 * 2)
    return c


class Slabs:
    """The slabs of a CTA of the forward pass, and their gathered columns, in its shared memory."""

    def __init__(self, plan: TileForward) -> None:
        self.plan = plan
        self.shared = SharedMemory(plan.shared.size)
        self.slabs, self.slab = plan.shared["SLAB"].offset, 2 * plan.slab.parity
        self.gathers = plan.shared["GATHER"].offset if plan.toeplitz.gathers else 0
        self.gather = plan.geometry.tiles * plan.slab.gather_tile

    def row(self, row: Addresses) -> Addresses:
        """Address of row ``row`` of the CTA."""
        padded = row + self.plan.slab.pad
        return self.slabs + (padded & 1) * self.plan.slab.parity + (padded >> 1) * self.plan.slab.row

    def clear_pads(self) -> None:
        """The rows no warp writes."""
        plan = self.plan
        words = plan.slab.pad // 2 * (plan.slab.row // 4)
        places = [(i // words, i % words) for i in range(2 * plan.slab.count * words)]
        to = [self.slabs + part * plan.slab.parity + word * 4 for part, word in places]
        if plan.toeplitz.gathers:
            places = [divmod(i, plan.slab.pad) for i in range(plan.slab.count * plan.geometry.tiles * plan.slab.pad)]
            to += [self.gathers + part * plan.slab.gather_tile + word * 4 for part, word in places]
        for first in range(0, len(to), 32):
            warp = np.array(to[first : first + 32])
            self.shared.store(warp, np.zeros((warp.size, 2)))
        self.shared.ways = 1  # once a CTA, it may take as long as it takes


class WarpSlab:
    """One warp's view of the slabs."""

    def __init__(self, slabs: Slabs, warp: int) -> None:
        plan = self.plan = slabs.plan
        toeplitz, row = plan.toeplitz, 16 * warp + 2 * G
        self.slabs, self.shared = slabs, slabs.shared
        self.store = slabs.row(row) + 4 * T
        self.rows = [
            slabs.row(16 * warp + 2 * (LANES & 7) + matrix_of(toeplitz, load) - plan.geometry.halo)
            for load in range(len(toeplitz.loads))
        ]
        self.store_pair = slabs.gathers + (row + plan.slab.pad) * 4
        self.gathered, self.third = gathered_rows(toeplitz, self.store_pair - 4 * plan.geometry.halo)
        self.carried = np.zeros((plan.slab.carry_chunks, 2, 32, 2))

    def write(self, s: Words, t: int) -> None:
        """Scores of a tile, (tiles, 2, 32, 2) as accumulators hold them, behind the last columns of the one before."""
        plan = self.plan
        even = self.store + (t & 1) * self.slabs.slab
        odd = even + plan.slab.parity
        for i, (first, second) in enumerate(self.carried):
            self.shared.store(even + i * 16, first)
            self.shared.store(odd + i * 16, second)
        for n, (first, second) in enumerate(s):
            chunk = n + plan.slab.carry_chunks
            if chunk < plan.slab.chunks:
                self.shared.store(even + chunk * 16, first)
                self.shared.store(odd + chunk * 16, second)
            if plan.toeplitz.gathers:
                lanes = T == 0
                at = self.store_pair + (t & 1) * self.slabs.gather + n * plan.slab.gather_tile
                self.shared.store(at[lanes], first[lanes], second[lanes])
        self.carried = s[plan.geometry.tiles - plan.slab.carry_chunks :].copy()

    def convolved(self, t: int, operands: Words, position: int | None = None) -> Words:
        """(tiles, 2, 32, 2); of the slab the warp's first row sees columns up to ``position``, if that is given."""
        plan = self.plan
        edge = position is not None and plan.keys + plan.toeplitz.carry - 1 > position
        return convolve(
            plan.toeplitz,
            self.shared,
            [rows + (t & 1) * self.slabs.slab for rows in self.rows],
            operands,
            plan.geometry.tiles,
            gathered=[words + (t & 1) * self.slabs.gather for words in self.gathered],
            third=self.third,
            gather_stride=plan.slab.gather_tile,
            position=position + 2 * G if edge else None,
        )


class WarpScores:
    """The same where the kernel is one tap: no slab."""

    def write(self, s: Words, t: int) -> None:
        """Scores of a tile, (tiles, 2, 32, 2) as accumulators hold them."""
        self.scores = s

    def convolved(self, t: int, weight: NDArray[np.float64], position: int | None = None) -> Words:
        """(tiles, 2, 32, 2)."""
        return self.scores * weight.item()
