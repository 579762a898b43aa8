"""The diagonals next to the mask's edge, on which the lifted score counts terms that the mask drops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy
from sympy import Expr

from ...spec import Spec
from ..geometry.affine import interval_over
from ..geometry.mask import Comparison, Mask
from ..geometry.stencil import Stencil

U, V, DELTA = sympy.symbols("u v delta", integer=True)  # a tap of the convolution, and a diagonal


@dataclass(frozen=True)
class Band:
    """The diagonals delta = i + off - j near the causal edge, on which the lifted score Ct differs from C.

    Attributes:
        width: F; Ct[i, j] is corrected by E[i, delta] for 0 <= delta < F.
        reach: E needs the scores A[i', f] = q[i'] . k[i' + off + f] for f = 1..reach.
        ahead: f + delta of the term of tap (u, v): how far its key lies ahead of its own row, counted from delta = 0.
        dropped: what drops that term besides f >= 1.
    """

    width: int
    reach: int
    ahead: Expr
    dropped: tuple[Comparison, ...]


@cache
def band(spec: Spec) -> Band:
    """The band of a request, from its stencil and its mask (lowering "lift", C = Ct - E).

    The lifted sum keeps every term; the mask drops those past the diagonal of the term's own row (terms ``source``) or
    of the output's row (``output``). A diagonal is in the band if some term on it is dropped.
    """
    mask = Mask.of(spec)
    r, c = sympy.symbols("r c", integer=True)
    term = r - c  # the term at offset (r, c) lies on diagonal delta + term
    taps = {r: U - (spec.cq - 1), c: V - spec.pad_left}
    ahead = sympy.expand(-term.subs(taps))
    if not mask.hides_later:
        return Band(0, 0, ahead, ())
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    box = {r: stencil.rows, c: stencil.cols}
    tested = term if mask.zeroes_scores else -c  # dropped when delta + tested < 0
    width = -int(interval_over(tested, box)[0])
    # A dropped term lies f = -(delta + term) above the diagonal, most at delta = 0; no band needs no scores.
    reach = -int(interval_over(term, box)[0]) if width else 0
    dropped = (Comparison((-tested).subs(taps), ">", DELTA),) if mask.zeroes_terms else ()
    return Band(width, reach, ahead, dropped)
