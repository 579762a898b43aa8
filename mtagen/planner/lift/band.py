"""The band: diagonals next to the mask's edges, where the lifted score counts terms that the mask
drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import sympy
from sympy import Expr

from ...spec import Spec
from ..geometry.affine import Size, interval_over
from ..geometry.mask import Comparison, Mask
from ..geometry.stencil import Stencil

U, F, DELTA = sympy.symbols("u f delta", integer=True)  # row of the weight, diagonal of a term, diagonal of a score


@dataclass(frozen=True)
class Band:
    """The diagonals next to one edge of the mask, on which the lifted score Ct differs from C.

    A lifted score of the band may count hidden keys. So it is not used: C is summed again from the
    terms that the mask counts, and is selected instead of Ct. Diagonals are counted inwards from
    the edge. A row's diagonal 0 is the last key that the row sees (or the first), the next key
    inwards is on diagonal 1, and hidden keys are on negative diagonals. The terms of a score of the
    band are scores on diagonals ``first`` to ``first + reach - 1`` of their own rows, which f
    numbers from 0 on.

    Attributes:
        later: whether the edge is at the last key that a row sees; otherwise it is at the first.
        limit: number of keys from the row's own position to that key.
        width: F; C is selected on the diagonals 0 <= delta < F.
        first: the outermost diagonal of a term in its own row; negative if the mask of the result's
            row drops terms.
        reach: number of diagonals that have terms.
        tap: v of the tap (u, v) of a term on diagonal f of the u-th row, in a score on diagonal
            delta. The score has no such term if v is no column of the weight.
        counted: the conditions on a term on diagonal f of the u-th row to count, besides 0 <= f <
            reach.
    """

    later: bool
    limit: int
    width: int
    first: int
    reach: int
    tap: Expr
    counted: tuple[Comparison, ...]

    @property
    def suffix(self) -> str:
        """The suffix that tells the names of kernels and tensors of the two bands apart."""
        return "" if self.later else "_earlier"

    def key(self, position: Size, delta: Size) -> Size:
        """Return the key on a diagonal of the row at a position."""
        return position + self.limit - delta if self.later else position - self.limit + delta

    def diagonal(self, position: Size, key: Size) -> Size:
        """Return the diagonal, delta, of a key for the row at a position."""
        return position + self.limit - key if self.later else key - position + self.limit

    def position(self, key: Size, delta: Size) -> Size:
        """Return the position of the row that has a key on a diagonal."""
        return key - self.limit + delta if self.later else key + self.limit - delta


@cache
def bands(spec: Spec) -> tuple[Band, ...]:
    """Return the bands of a request, from its stencil and its mask.

    The lifted sum keeps every term. The mask drops terms past an edge of the term's own row
    (``source``) or of the result's row (``output``). A diagonal is in a band if the edge drops a
    term of a score there. In a narrow window the two bands overlap; each then counts only the terms
    that both edges keep.
    """
    return tuple(_bands(spec, Mask.of(spec)))


def _bands(spec: Spec, mask: Mask) -> Iterator[Band]:
    r, c = sympy.symbols("r c", integer=True)
    row = U - (spec.cq - 1)  # row of a term, relative to the score's
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    box = {r: stencil.rows, c: stencil.cols}
    # The diagonal of a row's last visible key, counted from its first one, if both edges hide keys.
    across = mask.left + mask.right if mask.left is not None and mask.right is not None else None
    for later, sign, limit in ((True, 1, mask.right), (False, -1, mask.left)):
        if limit is None:
            continue
        term = sign * (r - c)  # the term at offset (r, c) is on diagonal delta + term of its own row
        tested = term if mask.zeroes_scores else -sign * c  # it counts if 0 <= delta + tested <= across
        least, most = map(int, interval_over(tested, box))
        width = -least if across is None else min(-least, across + 1)
        if not width:
            continue
        last = width - 1 + most if across is None else min(width - 1 + most, across)
        begin, end = map(int, interval_over(sympy.expand(term - tested), box))
        counted: tuple[Comparison, ...] = ()
        if mask.zeroes_terms:  # decided by the diagonal of the term's key in the row of the score
            diagonal = sympy.expand(begin + F - sign * row)
            counted = (Comparison(diagonal, ">=", sympy.S.Zero),)
            if across is not None:
                counted += (Comparison(diagonal, "<=", sympy.Integer(across)),)
        tap = sympy.expand(spec.pad_left + row - sign * (begin + F - DELTA))
        yield Band(later, limit, width, begin, last + end - begin + 1, tap, counted)
