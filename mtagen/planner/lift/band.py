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

U, V, DELTA = sympy.symbols("u v delta", integer=True)  # a tap of the convolution, and a diagonal


@dataclass(frozen=True)
class Band:
    """The diagonals next to one edge of the mask, on which the lifted score Ct differs from C.

    Diagonals are counted from the edge. On diagonal delta >= 0 a row sees the key that is delta keys before the last
    one that it sees, or after the first one. Dropped terms are scores of their own rows on the diagonals f, counted
    outwards: f = 1 is delta = inside - 1. They are hidden from these rows but for the first ``inside``, which another
    row's mask drops.

    Attributes:
        later: whether the edge is at the last key that a row sees, or at the first.
        limit: keys from the row's own position to that key.
        width: F; Ct is corrected on the diagonals 0 <= delta < F.
        inside: how many of the diagonals f are seen.
        reach: the correction needs the scores on the diagonals 1 <= f <= reach.
        ahead: f + delta of the term of tap (u, v) of a score on diagonal delta.
        dropped: what drops that term besides f >= 1.
    """

    later: bool
    limit: int
    width: int
    inside: int
    reach: int
    ahead: Expr
    dropped: tuple[Comparison, ...]

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
    """The bands of a request, from its stencil and its mask (lowering "lift", C = Ct - E).

    The lifted sum keeps every term; the mask drops those past the edge of the term's own row (terms ``source``) or of
    the output's row (``output``). A diagonal is in the band if some term on it is dropped. No term is past both edges.
    """
    return tuple(_bands(spec, Mask.of(spec)))


def _bands(spec: Spec, mask: Mask) -> Iterator[Band]:
    r, c = sympy.symbols("r c", integer=True)
    taps = {r: U - (spec.cq - 1), c: V - spec.pad_left}
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    box = {r: stencil.rows, c: stencil.cols}
    # Towards the later edge, the term at offset (r, c) lies on diagonal delta + r - c.
    for later, sign, limit in ((True, 1, mask.right), (False, -1, mask.left)):
        if limit is None:
            continue
        term = sign * (r - c)
        tested = term if mask.zeroes_scores else -sign * c  # dropped when delta + tested < 0
        width = -int(interval_over(tested, box)[0])
        if mask.left is not None and mask.right is not None:
            width = min(width, mask.left + mask.right + 1)  # past the other edge nothing is seen
        if not width:
            continue
        # A dropped term lies -(delta + term) diagonals past the edge: most at delta = 0, at least 1 + tested - term.
        inside = max(0, -int(interval_over(sympy.expand(tested - term), box)[0]))
        reach = inside - int(interval_over(term, box)[0])
        dropped = (Comparison((-tested).subs(taps), ">", DELTA),) if mask.zeroes_terms else ()
        yield Band(later, limit, width, inside, reach, sympy.expand(inside - term.subs(taps)), dropped)
