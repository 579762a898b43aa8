"""The convolution's mma's, fragment by fragment, against the convolution itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fragments import convolve, gathered_rows, make_toeplitz, matrix_of
from numpy.typing import NDArray
from tensor_cores import LANES, Addresses, G, SharedMemory, mma

from mtagen.errors import PlanError
from mtagen.planner.cuda.toeplitz import MAX_COLUMNS, MAX_ROWS, Toeplitz, toeplitz

Array = NDArray[np.float64]
TILES = 5  # odd, and more than a window has chunks

SIZES = list(itertools.product(range(1, MAX_ROWS + 1), range(1, MAX_COLUMNS + 1)))
ALL = [toeplitz(cq, ck) for cq, ck in SIZES]
WITHOUT_GATHERS = [toeplitz(cq, ck, pairs=False) for cq, ck in SIZES]


def name_of(b: Toeplitz) -> str:
    return f"{b.cq}x{b.ck}{'-pairs' if b.pairs else ''}"


def convolution(slab: Array, w: Array) -> Array:
    """out[i, n] = sum w[u, v] slab[i + u, n + v], as far as the slab reaches."""
    windows = np.lib.stride_tricks.sliding_window_view(slab, w.shape)
    return np.einsum("injk,jk->in", windows, w)


class Slab:
    """16 + cq - 1 rows as a warp's 16 outputs read them, those of even places first; nothing else is written."""

    def __init__(self, b: Toeplitz, seed: int, *, start: int, tiles: int = TILES) -> None:
        self.toeplitz, self.start, self.tiles = b, start, tiles
        rows, chunks = 16 + b.cq - 1, tiles + b.chunks - 1
        self.row_bytes = 16 * (chunks | 1)
        self.parity = (start + rows + 1) // 2 * self.row_bytes
        self.gather_row = 8 * -(-(start + rows) // 2)
        self.gathers = 2 * self.parity
        self.shared = SharedMemory(self.gathers + tiles * self.gather_row)
        rng = np.random.default_rng(seed)
        self.scores = rng.integers(-9, 10, (rows, 8 * (tiles + 2 + b.chunks))).astype(float)
        self.taps = rng.integers(-9, 10, (b.cq, b.ck)).astype(float)
        row = np.arange(rows)
        for column in range(0, 8 * chunks, 2):
            self.shared.store(self.row(row) + 2 * column, self.scores[:, column : column + 2])
        if b.gathers:
            for n in range(tiles):
                last = 8 * (n + b.chunks)
                self.shared.store(self.pair(row) + n * self.gather_row, self.scores[:, last : last + 2])
        self.shared.ways = 1  # of what is read

    def row(self, row: Addresses) -> Addresses:
        place = row + self.start
        return (place & 1) * self.parity + (place >> 1) * self.row_bytes

    def pair(self, row: Addresses) -> Addresses:
        return self.gathers + 4 * (row + self.start)

    def convolved(self, taps: Array) -> tuple[Array, dict[int, int]]:
        """By fragments: outputs (16, 8 tiles), and how many mma's each finished tile took."""
        b, finished = self.toeplitz, {}

        def finish(n: int, products: int) -> None:
            assert n not in finished
            finished[n] = products

        rows = [self.row(2 * (LANES & 7) + matrix_of(b, load)) for load in range(len(b.loads))]
        gathered, third = gathered_rows(b, self.pair(2 * G))
        operands = make_toeplitz(b, lambda u, v: taps[u, v] if 0 <= u < b.cq and 0 <= v < b.ck else 0.0)
        c = convolve(
            b,
            self.shared,
            rows,
            operands,
            self.tiles,
            gathered=gathered,
            third=third,
            gather_stride=self.gather_row,
            finish=finish,
        )
        # Row g of a fragment is row 2 g, row g + 8 is row 2 g + 1.
        return c.reshape(self.tiles, 2, 8, 8).transpose(2, 1, 0, 3).reshape(16, 8 * self.tiles), finished


@pytest.mark.parametrize("b", ALL, ids=name_of)
def test_convolution(b: Toeplitz) -> None:
    slab = Slab(b, 1, start=(b.cq - 1) % 2)
    expected = convolution(slab.scores, slab.taps)[:16, : 8 * TILES]
    got, finished = slab.convolved(slab.taps)
    assert np.array_equal(got, expected)
    assert finished == dict.fromkeys(range(TILES), b.mma_per_tile)
    assert slab.shared.ways == 1


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("tiles", [1, 2, 7, 8])
def test_any_number_of_tiles_and_either_parity(tiles: int, start: int) -> None:
    for b in WITHOUT_GATHERS[:: 5 if tiles > 2 else 2]:
        slab = Slab(b, tiles, start=start, tiles=tiles)
        expected = convolution(slab.scores, slab.taps)[:16, : 8 * tiles]
        got, finished = slab.convolved(slab.taps)
        assert np.array_equal(got, expected), name_of(b)
        assert finished == dict.fromkeys(range(tiles), b.mma_per_tile), name_of(b)


@pytest.mark.parametrize("b", WITHOUT_GATHERS, ids=name_of)
def test_flipped_taps_make_the_adjoint(b: Toeplitz) -> None:
    """<conv S, G> = <S, adjoint conv G>, rows and columns of G being those of S's outputs."""
    slab = Slab(b, 2, start=0)  # holds G: row i at its place i, key j at column j + ck - 1
    gradients = slab.scores[: 16 + b.cq - 1, : 8 * TILES + b.ck - 1]
    got, _ = slab.convolved(slab.taps[::-1, ::-1])
    scores = np.random.default_rng(3).integers(-9, 10, got.shape).astype(float)
    halo = ((b.cq - 1, b.cq - 1), (b.ck - 1, b.ck - 1))
    assert np.sum(convolution(np.pad(scores, halo), slab.taps) * gradients) == np.sum(scores * got)


def test_number_of_products() -> None:
    """A row shift and a chunk of the window is half an mma; of an odd cq the last shift pairs its own chunks."""
    for b in (*ALL, *WITHOUT_GATHERS):
        whole = b.cq // 2 * b.chunks + b.cq % 2 * -(-b.chunks // 2)
        assert b.mma_per_tile == whole + b.gathers, name_of(b)
        assert len(b.steps) == 2 * b.mma_per_tile, name_of(b)
        assert b.ck - 1 <= b.carry < b.ck + 7, name_of(b)
        assert {step.fragment for step in b.steps} == set(range(len(b.fragments) + b.gathers)), name_of(b)


def test_choice_of_gathers() -> None:
    assert [toeplitz(6, 11).mma_per_tile, toeplitz(6, 11, pairs=False).mma_per_tile] == [7, 9]
    for chosen, without in zip(ALL, WITHOUT_GATHERS, strict=True):
        assert chosen.mma_per_tile <= without.mma_per_tile
        assert chosen.mma_per_tile < without.mma_per_tile or not chosen.pairs


@pytest.mark.parametrize("size", [(MAX_ROWS + 1, 1), (1, MAX_COLUMNS + 1)])
def test_larger_kernels_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="larger than the halo"):
        toeplitz(*size)


def test_fragments_of_a_product() -> None:
    """The machine's own maps: ldmatrix of either order, and mma."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 10, (16, 16)).astype(float), rng.integers(-9, 10, (16, 8)).astype(float)
    shared = SharedMemory(1024)
    shared.elements[:256], shared.elements[256:384] = a.ravel(), b.ravel()
    by_rows = shared.load_matrices((LANES & 15) * 32 + (LANES >> 4) * 16)
    by_columns = shared.load_matrices(512 + (LANES & 15) * 16, count=2, transposed=True)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i, (row, column) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            assert by_rows[i, lane].tolist() == a[row, column : column + 2].tolist()
        for i in (0, 1):
            assert by_columns[i, lane].tolist() == b[8 * i + 2 * t : 8 * i + 2 * t + 2, g].tolist()
    c = np.zeros((2, 32, 2))
    mma(c, by_rows, by_columns)
    product = a @ b
    for lane in range(32):
        g, t = divmod(lane, 4)
        assert c[:, lane].tolist() == product[[g, g + 8], 2 * t : 2 * t + 2].tolist()
