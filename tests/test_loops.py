"""Loop bounds against the classes of all tiles, found by looking at every pair in them."""

import itertools
from types import SimpleNamespace

import pytest
import sympy

from mtagen.codegen.printers import python_code
from mtagen.planner.geometry.stencil import band
from mtagen.planner.lift.loops import BLOCK_M, BLOCK_N, key_owner_bounds, row_owner_bounds
from mtagen.spec import Spec

SPECS = [
    Spec((1, 1), 64, causal=False),
    Spec((3, 4), 64, causal=False),
    Spec((1, 1), 64),
    Spec((1, 3), 64, key_padding="right"),
    Spec((2, 5), 64, key_padding="left"),
    Spec((3, 4), 64),
    Spec((3, 5), 64, mask="output"),
    Spec((6, 11), 64),
]
LENGTHS = (1, 2, 5, 8, 13, 17)
BLOCKS = [(1, 1), (2, 4), (4, 2), (3, 5), (4, 4), (16, 8)]


def spec_id(spec):
    return f"{spec.cq}x{spec.ck}-{spec.key_padding}-{spec.mask}-{'causal' if spec.causal else 'full'}"


def compiled(bounds):
    """The bounds as a function of their symbols."""
    code = compile(f"({', '.join(map(python_code, bounds))},)", "<bounds>", "eval")
    return lambda **values: eval(code, values)


def grids():
    """Every small grid and tiling."""
    for n_q, n_k, (block_m, block_n) in itertools.product(LENGTHS, LENGTHS, BLOCKS):
        yield SimpleNamespace(n_q=n_q, n_k=n_k, off=n_k - n_q, BLOCK_M=block_m, BLOCK_N=block_n)


def segments(bounds, block):
    """The tiles a kernel visits, as (start, is_interior); checks that they are in order and aligned."""
    begin, interior_begin, interior_end, end = bounds
    assert 0 <= begin <= interior_begin <= interior_end <= end
    visited = [
        *((start, False) for start in range(begin, interior_begin, block)),
        *((start, True) for start in range(interior_begin, interior_end, block)),
        *((start, False) for start in range(interior_end, end, block)),
    ]
    starts = [start for start, _ in visited]
    assert all(start % block == 0 for start in starts)
    assert starts == sorted(set(starts))
    return visited


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_row_owner_visits_its_tiles_in_the_right_class(spec):
    width = band(spec).width
    bounds_at = compiled(row_owner_bounds(spec.causal, band=width))
    for grid in grids():
        for i0 in range(0, grid.n_q, grid.BLOCK_M):
            rows = range(i0, min(i0 + grid.BLOCK_M, grid.n_q))
            expected = []
            for start in range(0, grid.n_k, grid.BLOCK_N):
                keys = range(start, start + grid.BLOCK_N)
                cells = [(i + grid.off - j, j) for i in rows for j in keys]
                if any(j < grid.n_k and (delta >= 0 or not spec.causal) for delta, j in cells):
                    interior = all(j < grid.n_k and (delta >= width or not spec.causal) for delta, j in cells)
                    expected.append((start, interior))
            assert segments(bounds_at(i0=i0, **vars(grid)), grid.BLOCK_N) == expected


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_key_owner_visits_its_tiles_in_the_right_class(spec):
    """Visits are exact. The edge counts keys past n_k, so it is exact but for a partial last block."""
    width = band(spec).width
    bounds_at = compiled(key_owner_bounds(spec.causal, band=width))
    for grid in grids():
        for j0 in range(0, grid.n_k, grid.BLOCK_N):
            block = range(j0, j0 + grid.BLOCK_N)
            expected = []
            for start in range(0, grid.n_q, grid.BLOCK_M):
                rows = range(start, start + grid.BLOCK_M)
                cells = [(i, i + grid.off - j, j) for i in rows for j in block]
                real = [delta for i, delta, j in cells if i < grid.n_q and j < grid.n_k]
                if not spec.causal or any(delta >= 0 for delta in real):
                    interior = not spec.causal or all(delta >= width for _, delta, _ in cells)
                    expected.append((start, interior))
                    if interior and spec.causal:
                        assert all(delta >= width for delta in real)
                    elif j0 + grid.BLOCK_N <= grid.n_k:
                        assert not spec.causal or any(delta < width for delta in real)
            assert segments(bounds_at(j0=j0, **vars(grid)), grid.BLOCK_M) == expected


@pytest.mark.parametrize("bounds", [row_owner_bounds, key_owner_bounds])
@pytest.mark.parametrize("causal", [True, False])
def test_constants_may_be_given_early_or_late(bounds, causal):
    width = sympy.Symbol("BAND", integer=True, nonnegative=True)
    early = compiled(bounds(causal, 4, 2, 7))
    named = compiled(bounds(causal, band=7))
    late = compiled(bounds(causal, BLOCK_M, BLOCK_N, width))
    for n_q, n_k, start in itertools.product((3, 16, 31), (5, 16, 40), (0, 8, 12)):
        values = {"n_q": n_q, "n_k": n_k, "off": n_k - n_q, "i0": start, "j0": start}
        blocks = {"BLOCK_M": 4, "BLOCK_N": 2}
        assert early(**values) == named(**values, **blocks) == late(**values, **blocks, BAND=7)


@pytest.mark.parametrize("bounds", [row_owner_bounds, key_owner_bounds])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [0, 10])
def test_divisions_have_non_negative_numerators(bounds, causal, width):
    for position in bounds(causal, band=width):
        for rounded in position.atoms(sympy.floor, sympy.ceiling):
            numerator, denominator = sympy.fraction(rounded.args[0])
            assert numerator.is_nonnegative
            assert denominator.is_positive
