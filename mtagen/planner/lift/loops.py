"""Loop bounds of one CTA of the lifted kernels, as sympy expressions to be printed into a kernel.

A CTA owns a block of rows (queries) or of keys and streams tiles along the other axis. With
delta = i + off - j a tile is

* skipped, when no pair in it is allowed (every delta < 0);
* interior, when every delta >= band: no mask, no band correction;
* edge otherwise.

Each class is a bound on the extreme delta of the tile's box, which is affine in the tile's position along the
stream; so the bounds are roots of linear equations, aligned to tiles and clipped to the grid. They are exact:
for an owned block that starts inside the grid, a tile is visited if and only if it holds an allowed pair.
Divisions have non-negative numerators, because Triton's ``//`` truncates.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import sympy
from sympy import Expr, Max, Min

from ..geometry.affine import N_K, N_Q, Size, interval_over, root

I0, J0 = sympy.symbols("i0 j0", integer=True, nonnegative=True)  # first row or key of the owned block
OFF = sympy.Symbol("off", integer=True)  # n_k - n_q, negative when there are more queries than keys
BLOCK_M, BLOCK_N = sympy.symbols("BLOCK_M BLOCK_N", integer=True, positive=True)

_i, _j = sympy.symbols("i j", integer=True)  # any pair of a tile
_s = sympy.Symbol("s", integer=True)  # where the streamed tile starts
_DELTA = _i + OFF - _j


class StreamBounds(NamedTuple):
    """[begin, interior_begin) edge, [interior_begin, interior_end) interior, [interior_end, end) edge.

    Positions along the streamed axis, never decreasing. A segment starts at a multiple of the tile size or is
    empty.
    """

    begin: Expr
    interior_begin: Expr
    interior_end: Expr
    end: Expr


@cache  # solving takes sympy some 50 ms
def row_owner_bounds(causal: bool, block_m: Size = BLOCK_M, block_n: Size = BLOCK_N, band: Size = 0) -> StreamBounds:
    """Key tiles streamed by the CTA that owns rows [i0, i0 + block_m), i0 < n_q: interior first, then edge.

    A tile that reaches past n_k is an edge tile. Rows past n_q never matter: ``end`` is n_k once they appear.
    """
    rows, tile = (I0, I0 + block_m - 1), (_s, _s + block_n - 1)
    inside = [N_K - 1 - tile[1]]  # margins that an interior tile has, >= 0; they fall along the stream
    end = N_K
    if causal:
        lowest, _ = interval_over(_DELTA, {_i: rows, _j: tile})
        inside.append(lowest - band)
        _, highest = interval_over(_DELTA, {_i: rows})
        end = Max(0, Min(N_K, root(highest, _j) + 1))
    interior_end = _align_down(Min(*(root(margin, _s) + block_n for margin in inside)), block_n)
    return StreamBounds(sympy.S.Zero, sympy.S.Zero, interior_end, end)


@cache
def key_owner_bounds(causal: bool, block_m: Size = BLOCK_M, block_n: Size = BLOCK_N, band: Size = 0) -> StreamBounds:
    """Row tiles streamed by the CTA that owns keys [j0, j0 + block_n), j0 < n_k: edge first, then interior.

    Rows past n_q and keys past n_k contribute nothing by construction, so they make no edge. (The last key
    block, if partial, counts its missing keys too when it places the edge: some of its edge tiles hold no
    real pair of the band.)
    """
    if not causal:
        return StreamBounds(sympy.S.Zero, sympy.S.Zero, N_Q, N_Q)
    tile, keys = (_s, _s + block_m - 1), (J0, J0 + block_n - 1)
    lowest, highest = interval_over(_DELTA, {_i: tile, _j: keys})
    last_skipped = root(highest + 1, _s)  # a tile is skipped while its highest delta is at most -1
    begin = _align_down(last_skipped + block_m, block_m)
    interior_begin = Min(N_Q, _align_up(root(lowest - band, _s), block_m))
    return StreamBounds(begin, interior_begin, N_Q, N_Q)


def _align_down(position: Expr, block: Size) -> Expr:
    return block * sympy.floor(Max(0, position) / block)


def _align_up(position: Expr, block: Size) -> Expr:
    return block * sympy.ceiling(Max(0, position) / block)
