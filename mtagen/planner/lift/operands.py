"""Geometry of the lowering "lift": the convolution is folded into one operand of the scores.

A convolved score is then a sum of dot products. With keys lifted (cq <= ck), C[i, j] = sum_t q[i +
t - (cq-1)] . Khat_t[j], where Khat_t[j] = scale * sum_s W[t, s] k[j + s - pL]. With queries lifted,
the axes change roles: C[i, j] = sum_t Qhat_t[i] . k[j + t - pL], where Qhat_t[i] = scale * sum_s
W[s, t] q[i + s - (cq-1)]. Scores next to the mask's edges are computed in another way (see
:mod:`.band`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy
from sympy import Expr, Max, Min

from ...spec import Spec
from ..geometry.affine import N_K, N_Q
from ..geometry.loops import I0, J0, Loop, key_loop, row_loop
from ..geometry.mask import Mask
from ..geometry.stencil import Stencil
from .band import Band, bands
from .bias import Bias, bias

T = sympy.Symbol("t", integer=True, nonnegative=True)  # a term of the lifted score


@dataclass(frozen=True)
class Contraction:
    """The gradient of one operand: a product of g, the gradient of the scores, with the other
    operand.

    ``owner`` ("rows" | "keys") is the axis of the gradient. With ``sums_terms`` the terms are
    summed into one gradient, and g is read at shifted positions. Otherwise each term has a gradient
    of its own, that of the lifted operand.
    """

    owner: str
    sums_terms: bool
    g_row_shift: Expr
    g_key_shift: Expr
    loop: Loop

    @property
    def role(self) -> str:
        """The kernel's role, named after the gradient that it computes."""
        return {"rows": "dq", "keys": "dk"}[self.owner] + ("_shifted" if self.sums_terms else "_lifted")


@dataclass(frozen=True)
class Lift:
    """The geometry of the lowering for one spec; every field follows from the spec.

    Attributes:
        lifts_keys: whether keys are lifted (cq <= ck); otherwise queries are.
        terms: dot products per score, min(cq, ck).
        taps: filter entries that are summed into one lifted vector, max(cq, ck).
        pad: lifted vector x reads source vectors x + s - pad, 0 <= s < taps.
        row_shift, key_shift: term t pairs row i + row_shift with key j + key_shift.
        carried_rows: rows of g that a chunk of rows needs from the chunk before it.
        mask: the mask.
        bands: the diagonals on which the lifted score is not used.
        bias: what an expression before the convolution adds to lifted scores; None if nothing.
        forward, scores: loops of the kernels with these roles.
        contractions: the gradients of both operands.
    """

    lifts_keys: bool
    terms: int
    taps: int
    pad: int
    row_shift: Expr
    key_shift: Expr
    carried_rows: int
    mask: Mask
    bands: tuple[Band, ...]
    bias: Bias | None
    forward: Loop
    scores: Loop
    contractions: tuple[Contraction, Contraction]


@cache
def lift(spec: Spec) -> Lift:
    """Return the geometry of lifting along the filter's shorter axis: min(cq, ck) dot products per
    score.
    """
    lifts_keys = spec.cq <= spec.ck
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    above, _, left, right = (int(extent) for extent in stencil.halo)
    mask, width = Mask.of(spec), max((band.width for band in bands(spec)), default=0)
    row_shift = T - above if lifts_keys else sympy.S.Zero
    key_shift = sympy.S.Zero if lifts_keys else T - left
    shifted = (0, above) if lifts_keys else (-right, left)  # offsets at which the shifted operand's gradient reads g
    zero = sympy.S.Zero
    lifted_gradient = Contraction(
        owner="keys" if lifts_keys else "rows",
        sums_terms=False,
        g_row_shift=zero,
        g_key_shift=zero,
        loop=_contraction_loop(mask, "keys" if lifts_keys else "rows", (0, 0)),
    )
    shifted_gradient = Contraction(
        owner="rows" if lifts_keys else "keys",
        sums_terms=True,
        g_row_shift=-row_shift,
        g_key_shift=-key_shift,
        loop=_contraction_loop(mask, "rows" if lifts_keys else "keys", shifted),
    )
    return Lift(
        lifts_keys=lifts_keys,
        terms=min(spec.cq, spec.ck),
        taps=max(spec.cq, spec.ck),
        pad=left if lifts_keys else above,
        row_shift=row_shift,
        key_shift=key_shift,
        carried_rows=above if lifts_keys else 0,
        mask=mask,
        bands=bands(spec),
        bias=bias(spec),
        forward=key_loop(mask, band=width),
        scores=row_loop(mask, band=width),
        contractions=(lifted_gradient, shifted_gradient),
    )


def _contraction_loop(mask: Mask, owner: str, reads: tuple[int, int]) -> Loop:
    """Return the loop of a CTA that reads g at offsets ``reads`` (first, last) of its block.

    A tile is visited if any of the read blocks may be visible, and interior if all of them are. The
    first and the last block decide both.
    """
    if not mask.hides:  # no check is needed, because the operand that multiplies g is zero past its end
        length = N_K if owner == "rows" else N_Q
        return Loop(sympy.S.Zero, sympy.S.Zero, length, length)
    first, last = reads
    start, loop = (I0, key_loop(mask)) if owner == "rows" else (J0, row_loop(mask))
    if mask.condition:  # there is no convolution, and no interior
        return loop
    begin, end = loop.begin.subs(start, start + first), loop.end.subs(start, start + last)
    interior_begin = loop.interior_begin.subs(start, start + last)
    interior_end = loop.interior_end.subs(start, start + first)
    if mask.hides_earlier:  # in a narrow window the interiors of the two blocks need not meet
        interior_end = Max(begin, interior_end)
        interior_begin = Max(begin, Min(interior_begin, interior_end))
    return Loop(begin, interior_begin, interior_end, end)
