"""The templates' convolution and strips on the machine of :mod:`tensor_cores`, driven by a plan's numbers alone.

Function by function what convolve.j2, strip.j2 and no_strip.j2 print; names are theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tensor_cores import LANES, Addresses, G, SharedMemory, T, Words, mma

from mtagen.planner.tile.band import Band
from mtagen.planner.tile.forward import TileForward

Taps = Callable[[int, int], float]


def in_word(word: str) -> NDArray[np.int64]:
    """The byte that a lane takes of a word with a byte for each matrix."""
    return int(word, 16) >> (LANES & 24) & 255


def band_row(band: Band, load: int) -> NDArray[np.int64]:
    """Which of the matrices "rows 2 g + s" each lane addresses: s."""
    return in_word(band.quads[band.loads[load]].rows_word)


def band_chunk_offset(band: Band, load: int) -> NDArray[np.int64]:
    """Bytes from the current chunk to that which each lane addresses."""
    return -16 * in_word(band.quads[band.loads[load]].back_word)


def make_band(band: Band, taps: Taps) -> Words:
    """B operands (n, 2, 32, 2)."""

    def words(u: NDArray[np.int64], v: NDArray[np.int64]) -> Words:
        return np.array([[taps(x, y), taps(x, y + 1)] for x, y in zip(u.tolist(), v.tolist(), strict=True)])

    operands, offset = [], 2 * T - G
    for halves in band.fragments:
        operands.append([words(0 * T + h[0], 8 * h[1] + offset) if h else np.zeros((32, 2)) for h in halves])
    for gather in range(band.gathers):
        operands.append([words(8 * gather + half + 2 * T, 8 * band.chunks - G) for half in (0, 1)])
    return np.array(operands)


def load_triple(band: Band, shared: SharedMemory, word: Addresses, third: Addresses | int) -> Words:
    """Words of rows r, r + 1, r + 2 as an A operand."""
    if band.cq % 2:
        first, second = shared.load(word, 2)
        (last,) = shared.load(word + third)
    else:
        second, last = shared.load(word + 4, 2)
        (first,) = shared.load(word)
    return np.stack([first, second, second, last])


def gathered_rows(band: Band, above: Addresses) -> tuple[list[Addresses], Addresses]:
    """Each gather's words, and ``third`` of the last; ``above`` is the word of the first row that a lane reads."""
    halo = band.cq - 1
    rows = [above + 4 * (8 * x + np.minimum(2 * T, halo // 2 * 2 - 8 * x)) for x in range(band.gathers)]
    return rows, np.where(8 * (band.gathers - 1) + 2 * T < halo, 8, 4)


def convolve(
    band: Band,
    shared: SharedMemory,
    rows: list[Addresses],
    operands: Words,
    tiles: int,
    *,
    gathered: list[Addresses] = (),  # type: ignore[assignment]
    third: Addresses | int = 8,
    gather_stride: int = 0,
    limit: Addresses | None = None,
    finish: Callable[[int, int], None] = lambda n, products: None,
) -> Words:
    """c (tiles, 2, 32, 2).

    Output row r of a lane's two sees strip columns up to ``limit`` + r only, if that is given. ``finish`` is told of
    each finished tile and how many mma's it took.
    """
    chunks = tiles + band.chunks - 1
    c = np.zeros((tiles, 2, 32, 2))
    a: dict[tuple[int, int], Words] = {}  # (quad, chunk); registers that nothing has written are not there
    pair: dict[tuple[int, int], Words] = {}
    products: Counter[int] = Counter()

    def load(chunk: int) -> None:
        if chunk >= chunks:
            return
        for at, q in enumerate(band.loads):
            offset = 16 * chunk
            if band.quads[q].reaches_back:
                offset = offset + band_chunk_offset(band, at) if chunk else 0
            a[q, chunk] = shared.load_matrices(rows[at] + offset)
        if chunk >= tiles:
            return
        for x in range(band.gathers):
            last = x == band.gathers - 1
            pair[x, chunk] = load_triple(band, shared, gathered[x] + chunk * gather_stride, third if last else 8)

    def gather_quads(chunk: int) -> None:
        for q, quad in enumerate(band.quads):
            if quad.copies and chunk < chunks and (chunk > 0 or not quad.reaches_back):
                a[q, chunk] = np.stack([a[source, chunk - back][place] for source, back, place in quad.sources])

    def multiply(tile: int, get: Callable[[], Words], b: Words, columns: tuple[Addresses, Addresses]) -> None:
        if 0 <= tile < tiles:
            seen = get()
            if limit is not None:  # columns of the words of the halves of k
                column = np.stack([columns[0], columns[0], columns[1], columns[1]])[..., None] + np.arange(2)
                row = np.array([0, 1, 0, 1])[:, None, None]
                seen = np.where(column <= limit[:, None] + row, seen, 0)
            mma(c[tile], seen, b)
            products[tile] += 1

    def complete(m: int) -> None:
        for n in range(m - (band.chunks - 1), m + 2 - (band.chunks - 1)):
            if 0 <= n < tiles:
                finish(n, products[n])

    for m in range(0, chunks, 2):
        load(m), load(m + 1)
        gather_quads(m), gather_quads(m + 1)
        complete(m - 2)
        for step in band.steps:
            b = operands[step.fragment]
            if step.quad is None:
                key = step.fragment - len(band.fragments), m + step.chunk
                column = 0 * T + 8 * (m + step.chunk + band.chunks)
                multiply(m + step.tile, lambda key=key: pair[key], b, (column, column))
            elif not step.chunk or m + 1 < chunks:
                key = step.quad, m + step.chunk
                back = [band.quads[step.quad].matrices[place][1] for place in (0, 2)]
                columns = tuple(8 * (m + step.chunk - chunks_back) + 2 * T for chunks_back in back)
                multiply(m + step.tile, lambda key=key: a[key], b, columns)
    complete((chunks - 1) // 2 * 2)
    return c


class Strips:
    """The strips of a CTA of the forward pass, and their gathered columns, in its shared memory."""

    def __init__(self, plan: TileForward) -> None:
        self.plan = plan
        self.shared = SharedMemory(plan.shared.size)
        self.strips, self.strip = plan.shared["STRIP"].offset, 2 * plan.strip_parity
        self.gathers = plan.shared["GATHER"].offset if plan.band.gathers else 0
        self.gather = plan.tiles * plan.gather_row

    def row(self, row: Addresses) -> Addresses:
        """Address of row ``row`` of the CTA."""
        padded = row + self.plan.strip_pad
        return self.strips + (padded & 1) * self.plan.strip_parity + (padded >> 1) * self.plan.strip_row

    def clear_pads(self) -> None:
        """The rows no warp writes."""
        plan = self.plan
        words = plan.strip_pad // 2 * (plan.strip_row // 4)
        places = [(i // words, i % words) for i in range(2 * plan.strips * words)]
        to = [self.strips + part * plan.strip_parity + word * 4 for part, word in places]
        if plan.band.gathers:
            places = [divmod(i, plan.strip_pad) for i in range(plan.strips * plan.tiles * plan.strip_pad)]
            to += [self.gathers + part * plan.gather_row + word * 4 for part, word in places]
        for first in range(0, len(to), 32):
            warp = np.array(to[first : first + 32])
            self.shared.store(warp, np.zeros((warp.size, 2)))
        self.shared.ways = 1  # once a CTA, it may take as long as it takes


class WarpStrip:
    """One warp's view of the strips."""

    def __init__(self, strips: Strips, warp: int) -> None:
        plan = self.plan = strips.plan
        band, row = plan.band, 16 * warp + 2 * G
        self.strips, self.shared = strips, strips.shared
        self.store = strips.row(row) + 4 * T
        self.rows = [
            strips.row(16 * warp + 2 * (LANES & 7) + band_row(band, load) - plan.halo)
            for load in range(len(band.loads))
        ]
        self.store_pair = strips.gathers + (row + plan.strip_pad) * 4
        self.gathered, self.third = gathered_rows(band, self.store_pair - 4 * plan.halo)
        self.carried = np.zeros((plan.carry_chunks, 2, 32, 2))

    def write(self, s: Words, t: int) -> None:
        """Scores of a tile, (tiles, 2, 32, 2) as accumulators hold them, behind the last columns of the one before."""
        plan = self.plan
        even = self.store + (t & 1) * self.strips.strip
        odd = even + plan.strip_parity
        for i, (first, second) in enumerate(self.carried):
            self.shared.store(even + i * 16, first)
            self.shared.store(odd + i * 16, second)
        for n, (first, second) in enumerate(s):
            chunk = n + plan.carry_chunks
            if chunk < plan.strip_chunks:
                self.shared.store(even + chunk * 16, first)
                self.shared.store(odd + chunk * 16, second)
            if plan.band.gathers:
                lanes = T == 0
                at = self.store_pair + (t & 1) * self.strips.gather + n * plan.gather_row
                self.shared.store(at[lanes], first[lanes], second[lanes])
        self.carried = s[plan.tiles - plan.carry_chunks :].copy()

    def convolved(self, t: int, operands: Words, limit: int | None = None) -> Words:
        """(tiles, 2, 32, 2); of the strip the warp's first row sees columns up to ``limit``."""
        plan = self.plan
        edge = limit is not None and limit < plan.keys + plan.band.carry - 1
        return convolve(
            plan.band,
            self.shared,
            [rows + (t & 1) * self.strips.strip for rows in self.rows],
            operands,
            plan.tiles,
            gathered=[words + (t & 1) * self.strips.gather for words in self.gathered],
            third=self.third,
            gather_stride=plan.gather_row,
            limit=limit + 2 * G if edge else None,
        )


class WarpScores:
    """The same where the kernel is one tap: no strip."""

    def write(self, s: Words, t: int) -> None:
        """Scores of a tile, (tiles, 2, 32, 2) as accumulators hold them."""
        self.scores = s

    def convolved(self, t: int, weight: NDArray[np.float64], limit: int | None = None) -> Words:
        """(tiles, 2, 32, 2)."""
        return self.scores * weight.item()
