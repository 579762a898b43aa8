"""Loops over tiles against the classes of all tiles, found by looking at every pair in them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import sympy

from mtagen.codegen.printers import python_code
from mtagen.planner.geometry.loops import BLOCK_M, BLOCK_N, key_loop, row_loop
from mtagen.planner.geometry.mask import Mask

FULL, CAUSAL = Mask(None, None), Mask(None, 0)
WINDOWS = [
    Mask(None, 3),
    Mask(4, None),
    Mask(0, 0),
    Mask(2, 0),
    Mask(7, 0),
    Mask(0, 5),
    Mask(3, 2),
    Mask(11, 6),
    Mask(30, 1),
]
MASKS = [FULL, CAUSAL, *WINDOWS]
BANDS = (0, 1, 2, 4, 10)
LENGTHS = (1, 2, 5, 8, 13, 17, 30)
BLOCKS = [(1, 1), (2, 4), (4, 2), (3, 5), (4, 4), (16, 8)]


def name_of(mask):
    return mask.name


def compiled(loop):
    """The loop's positions as a function of their symbols."""
    code = compile(f"({', '.join(map(python_code, loop))},)", "<loop>", "eval")
    return lambda **values: eval(code, values)


def grids():
    """Every small grid and tiling."""
    for n_q, n_k, (block_m, block_n) in itertools.product(LENGTHS, LENGTHS, BLOCKS):
        yield SimpleNamespace(n_q=n_q, n_k=n_k, off=n_k - n_q, BLOCK_M=block_m, BLOCK_N=block_n)


def visited(positions, block):
    """The tiles a kernel visits, as (start, is_interior); checks that they are in order and aligned."""
    begin, interior_begin, interior_end, end = positions
    assert 0 <= begin <= interior_begin <= interior_end <= end
    tiles = [
        *((start, False) for start in range(begin, interior_begin, block)),
        *((start, True) for start in range(interior_begin, interior_end, block)),
        *((start, False) for start in range(interior_end, end, block)),
    ]
    starts = [start for start, _ in tiles]
    assert all(start % block == 0 for start in starts)
    assert starts == sorted(set(starts))
    return tiles


class Pairs:
    """Every pair of a row and a key of a grid that is padded to whole tiles."""

    def __init__(self, mask, band, grid):
        rows, keys = (-(-n // block) * block for n, block in ((grid.n_q, grid.BLOCK_M), (grid.n_k, grid.BLOCK_N)))
        i, j = np.indices((rows, keys), sparse=True)
        later = j - (i + grid.off)  # keys by which j lies after the row's own position
        self.is_row, self.is_key = i < grid.n_q, j < grid.n_k
        self.visible = self.is_row & self.is_key & allowed(mask, later, margin=0)
        self.clear = allowed(mask, later, margin=band)
        self._shape = (rows // grid.BLOCK_M, grid.BLOCK_M, keys // grid.BLOCK_N, grid.BLOCK_N)

    def tiles(self, pairs, reduced):
        """Whether any, or all, of these pairs hold in each tile: (blocks of rows, blocks of keys)."""
        whole = np.broadcast_to(pairs, self.visible.shape).reshape(self._shape)
        return reduced(whole, axis=(1, 3))


def allowed(mask, later, margin):
    """Pairs that a mask shows, ``margin`` or more diagonals away from the first one that it hides on either side."""
    left, right = (np.inf if limit is None else limit - margin for limit in (mask.left, mask.right))
    return (-left <= later) & (later <= right)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("mask", MASKS, ids=name_of)
def test_the_owner_of_rows_visits_its_tiles_in_the_right_class(mask, band):
    """Visits are exact. Before the window's left edge rows past n_q count too, where the last block is partial."""
    positions_at = compiled(key_loop(mask, band=band))
    for grid in grids():
        pairs = Pairs(mask, band, grid)
        seen = pairs.tiles(pairs.visible, np.any)
        interior = pairs.tiles(pairs.clear & pairs.is_key, np.all)
        exact = pairs.tiles((pairs.clear & pairs.is_key) | ~pairs.is_row, np.all)
        assert not (interior & ~exact).any()
        for block, i0 in enumerate(range(0, grid.n_q, grid.BLOCK_M)):
            if mask.left is None or i0 + grid.BLOCK_M <= grid.n_q:
                assert (interior[block] == exact[block]).all()
            expected = [(tile * grid.BLOCK_N, bool(interior[block, tile])) for tile in np.flatnonzero(seen[block])]
            assert visited(positions_at(i0=i0, **vars(grid)), grid.BLOCK_N) == expected


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("mask", MASKS, ids=name_of)
def test_the_owner_of_keys_visits_its_tiles_in_the_right_class(mask, band):
    """Visits are exact. Edges count rows past n_q and keys past n_k, so they are exact but for partial blocks."""
    positions_at = compiled(row_loop(mask, band=band))
    for grid in grids():
        pairs = Pairs(mask, band, grid)
        seen = pairs.tiles(pairs.visible, np.any)
        interior = pairs.tiles(pairs.clear, np.all)
        exact = pairs.tiles(pairs.clear | ~pairs.is_row | ~pairs.is_key, np.all)
        assert not (interior & ~exact).any()
        rows, keys = grid.n_q // grid.BLOCK_M, grid.n_k // grid.BLOCK_N
        assert (interior[:rows, :keys] == exact[:rows, :keys]).all()
        for block, j0 in enumerate(range(0, grid.n_k, grid.BLOCK_N)):
            tiles = np.flatnonzero(seen[:, block])
            expected = [(tile * grid.BLOCK_M, bool(interior[tile, block])) for tile in tiles]
            assert visited(positions_at(j0=j0, **vars(grid)), grid.BLOCK_M) == expected


@pytest.mark.parametrize(
    ("loop", "mask", "edges"),
    [
        (row_loop, FULL, [False]),
        (row_loop, CAUSAL, [True, False]),
        (row_loop, Mask(7, 0), [True, False, True]),
        (key_loop, FULL, [False, True]),  # the last tile may reach past the keys
        (key_loop, CAUSAL, [False, True]),
        (key_loop, Mask(7, 0), [True, False, True]),
    ],
)
def test_segments_are_the_parts_that_there_may_be(loop, mask, edges):
    made = loop(mask)
    assert [segment.edge for segment in made.segments] == edges
    assert (made.segments[0].begin, made.segments[-1].end) == (made.begin, made.end)
    for one, following in itertools.pairwise(made.segments):
        assert one.end == following.begin


@pytest.mark.parametrize("loop", [key_loop, row_loop])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(None, 3), Mask(20, 3)], ids=name_of)
def test_constants_may_be_given_early_or_late(loop, mask):
    width = sympy.Symbol("BAND", integer=True, nonnegative=True)
    early = compiled(loop(mask, 4, 2, 7))
    named = compiled(loop(mask, band=7))
    late = compiled(loop(mask, BLOCK_M, BLOCK_N, width))
    for n_q, n_k, start in itertools.product((3, 16, 31), (5, 16, 40), (0, 8, 12)):
        values = {"n_q": n_q, "n_k": n_k, "off": n_k - n_q, "i0": start, "j0": start}
        blocks = {"BLOCK_M": 4, "BLOCK_N": 2}
        assert early(**values) == named(**values, **blocks) == late(**values, **blocks, BAND=7)


@pytest.mark.parametrize("loop", [key_loop, row_loop])
@pytest.mark.parametrize("mask", MASKS, ids=name_of)
@pytest.mark.parametrize("width", [0, 10])
def test_divisions_have_non_negative_numerators(loop, mask, width):
    """Triton divides toward zero."""
    for position in loop(mask, band=width):
        for rounded in position.atoms(sympy.floor, sympy.ceiling):
            numerator, denominator = sympy.fraction(rounded.args[0])
            assert numerator.is_nonnegative
            assert denominator.is_positive
