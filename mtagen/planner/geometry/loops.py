"""Loops of a CTA over tiles of scores, as sympy expressions that are printed into a kernel.

A CTA owns a block of rows (queries) or of keys and streams tiles along the other axis. A tile is

* skipped, if the mask hides all its pairs (row, key);
* interior, if all its pairs are visible and at least ``band`` diagonals away from every edge of the
mask;
* edge otherwise, and then its pairs are checked one by one.

Each class is a bound on the minimum or maximum of p - j over the tile, where p is a row's position
and j a key. These are affine in the tile's beginning, so the ends of the classes are roots of
linear equations, aligned to tiles and clipped to the grid. They are exact: if the owned block
starts inside the grid, a tile is visited if and only if it has a visible pair. Numerators of
divisions are non-negative, because Triton's ``//`` truncates.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import sympy
from sympy import Expr, Max, Min

from .affine import N_K, N_Q, Size, interval_over, root
from .mask import Mask

I0, J0 = sympy.symbols("i0 j0", integer=True, nonnegative=True)  # first row or key of the owned block
OFF = sympy.Symbol("off", integer=True)  # the name of ``Sequence.offset`` in a kernel
BLOCK_M, BLOCK_N = sympy.symbols("BLOCK_M BLOCK_N", integer=True, positive=True)
# A mask in tables: the extremes of the first and last keys of a block of rows, and the rows that see a block of keys.
LEAST_FIRST, MOST_FIRST, LEAST_LAST, MOST_LAST = sympy.symbols(
    "least_first most_first least_last most_last", integer=True
)
FIRST_ROW, END_ROW = sympy.symbols("first_row end_row", integer=True, nonnegative=True)
# Masks may have a gap between two runs of keys. These are the extremes of the gaps of a block of rows, the first row
# whose gap holds all keys of a block, and the end of those rows.
MOST_FIRST_HIDDEN, LEAST_LAST_HIDDEN = sympy.symbols("most_first_hidden least_last_hidden", integer=True)
FIRST_HIDDEN_ROW, END_HIDDEN_ROW = sympy.symbols("first_hidden_row end_hidden_row", integer=True, nonnegative=True)

_i, _j = sympy.symbols("i j", integer=True)  # any pair of a tile
_s = sympy.Symbol("s", integer=True)  # first row or key of the streamed tile
_AHEAD = _i + OFF - _j  # position of a row minus a key


class Segment(NamedTuple):
    """A part of a loop, [begin, end), whose tiles are all interior or all edge tiles."""

    begin: Expr
    end: Expr
    edge: bool


class Loop(NamedTuple):
    """Positions along the streamed axis where the segments of a loop begin and end; they never
    decrease.

    [begin, interior_begin) are edge tiles, [interior_begin, interior_end) interior tiles,
    [interior_end, end) edge tiles. A segment starts at a multiple of the tile size or is empty.
    """

    begin: Expr
    interior_begin: Expr
    interior_end: Expr
    end: Expr

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the positions in kernels."""
        return self._fields

    @property
    def middle(self) -> str:
        """What the tiles between the two inner positions are, for plans."""
        return "interior"

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the loop, without those that are empty for all sizes."""
        parts = zip(self[:-1], self[1:], (True, False, True), strict=True)
        return tuple(Segment(begin, end, edge) for begin, end, edge in parts if begin != end)


class LoopWithGap(Loop):
    """A loop whose inner tiles are skipped, because they are in the gap between two runs; the others are edge tiles."""

    @property
    def names(self) -> tuple[str, ...]:
        return "begin", "gap_begin", "gap_end", "end"

    @property
    def middle(self) -> str:
        return "without"

    @property
    def segments(self) -> tuple[Segment, ...]:
        begin, gap_begin, gap_end, end = self
        return Segment(begin, gap_begin, edge=True), Segment(gap_end, end, edge=True)


def _with_gap(begin: Expr, gap: tuple[Expr, Expr], end: Expr, block: Size) -> Loop:
    """Return a loop that skips the tiles in a gap, which is given by its first and last row or key."""
    first, last = gap
    gap_begin = Min(Max(begin, _align_up(first, block)), end)
    return LoopWithGap(begin, gap_begin, Max(gap_begin, Min(_align_down(last + 1, block), end)), end)


@cache  # solving takes sympy some 50 ms
def key_loop(mask: Mask, block_m: Size = BLOCK_M, block_n: Size = BLOCK_N, band: Size = 0) -> Loop:
    """Return the loop over key tiles of the CTA that owns rows [i0, i0 + block_m), i0 < n_q.

    A tile that reaches past n_k is an edge tile. Rows past n_q add no tile, because the loop ends
    at n_k at the latest. They do count for the beginning of the interior: with a partial last row
    block, a tile may be an edge tile although all its existing pairs are interior.
    """
    if mask.is_tabulated:
        end = MOST_LAST + 1
        begin = Min(end, _align_down(LEAST_FIRST, block_n))
        if mask.has_gap:
            return _with_gap(begin, (MOST_FIRST_HIDDEN, LEAST_LAST_HIDDEN), end, block_n)
        if mask.condition:
            return Loop(begin, end, end, end)
        interior_end = Max(begin, _align_down(LEAST_LAST + 1, block_n))
        return Loop(begin, Min(Max(begin, _align_up(MOST_FIRST, block_n)), interior_end), interior_end, end)
    rows, tile = (I0, I0 + block_m - 1), (_s, _s + block_n - 1)
    least, most = interval_over(_AHEAD, {_i: rows, _j: tile})
    begin = interior_begin = sympy.S.Zero
    margins, end = [N_K - 1 - tile[1]], N_K  # no margin of an interior tile is negative; they decrease along the loop
    if mask.right is not None:
        margins.append(least + mask.right - band)
        _, farthest = interval_over(_AHEAD + mask.right, {_i: rows})
        end = Max(0, Min(N_K, root(farthest, _j) + 1))
    interior_end = _align_down(Min(*(root(margin, _s) + block_n for margin in margins)), block_n)
    if mask.left is not None:
        last_skipped = root(mask.left - least + 1, _s)  # a tile is skipped while the first row sees none of its keys
        begin = Min(end, _align_down(last_skipped + block_n, block_n))
        interior_end = Max(begin, interior_end)
        interior_begin = Min(Max(begin, _align_up(root(mask.left - band - most, _s), block_n)), interior_end)
    return Loop(begin, interior_begin, interior_end, end)


@cache
def row_loop(mask: Mask, block_m: Size = BLOCK_M, block_n: Size = BLOCK_N, band: Size = 0) -> Loop:
    """Return the loop over row tiles of the CTA that owns keys [j0, j0 + block_n), j0 < n_k.

    Rows past n_q and keys past n_k contribute nothing by construction, so they are not checked.
    They do count for the place of the interior: with a partial last key block or row tile, a tile
    may be an edge tile although all its existing pairs are interior.
    """
    if mask.is_tabulated:
        begin, end = _align_down(FIRST_ROW, block_m), END_ROW
        if mask.has_gap:
            return _with_gap(begin, (FIRST_HIDDEN_ROW, END_HIDDEN_ROW - 1), end, block_m)
        return Loop(begin, end, end, end)
    tile, keys = (_s, _s + block_m - 1), (J0, J0 + block_n - 1)
    least, most = interval_over(_AHEAD, {_i: tile, _j: keys})
    begin = interior_begin = sympy.S.Zero
    interior_end = end = N_Q
    if mask.right is not None:
        last_skipped = root(most + mask.right + 1, _s)  # a tile is skipped while its last row sees none of the keys
        begin = _align_down(last_skipped + block_m, block_m)
        interior_begin = Min(N_Q, _align_up(root(least + mask.right - band, _s), block_m))
    if mask.left is not None:
        end = Max(0, Min(N_Q, root(mask.left - least, _s) + 1))
        begin = Min(begin, end)
        interior_end = Max(begin, Min(end, _align_down(root(mask.left - band - most, _s) + block_m, block_m)))
        interior_begin = Min(Max(begin, interior_begin), interior_end)
    return Loop(begin, interior_begin, interior_end, end)


def _align_down(position: Expr, block: Size) -> Expr:
    return block * sympy.floor(Max(0, position) / block)


def _align_up(position: Expr, block: Size) -> Expr:
    return block * sympy.ceiling(Max(0, position) / block)
