"""The diagonals next to the mask's edges, on which the lifted score counts terms that the mask drops."""

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

U, F, DELTA = sympy.symbols("u f delta", integer=True)  # a row of the weight, and diagonals of a term and a score


@dataclass(frozen=True)
class Band:
    """The diagonals next to one edge of the mask, on which the lifted score Ct differs from C.

    A lifted score of the band may count hidden keys. So it is not used: C is summed anew from the terms that the mask
    counts, and selected there. Diagonals are counted inwards from the edge: a row's diagonal 0 is the last key that the
    row sees, or the first; the next key inwards is on diagonal 1; hidden keys are on negative diagonals. The terms of
    a score are scores of rows on diagonals ``first`` to ``first + reach - 1`` of these rows, numbered by f from 0 on.

    Attributes:
        later: whether the edge is at the last key that a row sees, or at the first.
        limit: keys from the row's own position to that key.
        width: F; C is selected on the diagonals 0 <= delta < F.
        first: the outermost diagonal that a term is on in its row; negative where the mask of the result's row
            drops terms.
        reach: how many diagonals terms are on.
        tap: v of the tap (u, v) that a term on diagonal f of the u-th row has in a score on diagonal delta. The score
            has no such term if v is no column of the weight.
        counted: what the mask asks of a term on diagonal f of the u-th row, besides 0 <= f < reach.
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
        """Tells the names of kernels and tensors of the two bands apart."""
        return "" if self.later else "_earlier"

    def key(self, position: Size, delta: Size) -> Size:
        """The key on a diagonal of the row at a position."""
        return position + self.limit - delta if self.later else position - self.limit + delta

    def diagonal(self, position: Size, key: Size) -> Size:
        """The diagonal, delta, that a key is on for the row at a position."""
        return position + self.limit - key if self.later else key - position + self.limit

    def position(self, key: Size, delta: Size) -> Size:
        """The position of the row on whose diagonal a key is."""
        return key - self.limit + delta if self.later else key + self.limit - delta


@cache
def bands(spec: Spec) -> tuple[Band, ...]:
    """The bands of a request, from its stencil and its mask.

    The lifted sum keeps every term; the mask drops those past an edge of the term's own row (terms ``source``) or of
    the output's row (``output``). A diagonal is in a band if its edge drops some term of a score there. In a narrow
    window bands overlap; each counts what both edges leave.
    """
    return tuple(_bands(spec, Mask.of(spec)))


def _bands(spec: Spec, mask: Mask) -> Iterator[Band]:
    r, c = sympy.symbols("r c", integer=True)
    row = U - (spec.cq - 1)  # of a term, from that of the score
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    box = {r: stencil.rows, c: stencil.cols}
    # The diagonal of a row's last seen key, counted from the first one, if both edges hide keys.
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
        if mask.zeroes_terms:  # by the diagonal that the term's key is on in the row of the score
            diagonal = sympy.expand(begin + F - sign * row)
            counted = (Comparison(diagonal, ">=", sympy.S.Zero),)
            if across is not None:
                counted += (Comparison(diagonal, "<=", sympy.Integer(across)),)
        tap = sympy.expand(spec.pad_left + row - sign * (begin + F - DELTA))
        yield Band(later, limit, width, begin, last + end - begin + 1, tap, counted)
