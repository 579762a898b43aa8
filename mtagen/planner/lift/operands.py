"""The "lift" lowering: the convolution folded into one operand, so that a score is a sum of dot products.

With keys lifted (cq <= ck), C[i, j] = sum_t q[i + t - (cq-1)] . Khat_t[j],
Khat_t[j] = scale * sum_s W[t, s] k[j + s - pL];
with queries lifted, the same with the axes exchanged: C[i, j] = sum_t Qhat_t[i] . k[j + t - pL],
Qhat_t[i] = scale * sum_s W[s, t] q[i + s - (cq-1)]. Only the causal band needs a correction (see ``stencil.band``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy
from sympy import Expr

from ...spec import Spec
from ..geometry.stencil import Stencil, band
from .loops import I0, J0, StreamBounds, key_owner_bounds, row_owner_bounds

T = sympy.Symbol("t", integer=True, nonnegative=True)  # a term of the lifted score


@dataclass(frozen=True)
class Contraction:
    """One operand's gradient as a product of g, the gradient of the scores, with the other operand.

    ``owner`` ("rows" | "keys") is the axis whose gradient it is. With ``sums_terms`` the terms are summed into one
    gradient, g being read at the shifted position; otherwise each term has its own (of the lifted operand).
    """

    owner: str
    sums_terms: bool
    g_row_shift: Expr
    g_key_shift: Expr
    bounds: StreamBounds

    @property
    def role(self) -> str:
        """The kernel's name in a plan: what it computes the gradient of."""
        return {"rows": "dq", "keys": "dk"}[self.owner] + ("_shifted" if self.sums_terms else "_lifted")


@dataclass(frozen=True)
class Lift:
    """The geometry of the lowering for one spec; every field follows from the spec.

    Attributes:
        lifts_keys: keys are lifted (cq <= ck), else queries.
        terms: dot products per score, min(cq, ck).
        taps: kernel entries summed into one lifted vector, max(cq, ck).
        pad: lifted vector x reads source vectors x + s - pad, 0 <= s < taps.
        row_shift, key_shift: term t pairs row i + row_shift with key j + key_shift.
        carry: rows of g that a strip of rows needs from the strip before it.
        band_width, reach: see ``stencil.BandGeometry``.
    """

    lifts_keys: bool
    terms: int
    taps: int
    pad: int
    row_shift: Expr
    key_shift: Expr
    carry: int
    band_width: int
    reach: int
    forward: StreamBounds
    scores: StreamBounds
    contractions: tuple[Contraction, Contraction]


@cache
def lift(spec: Spec) -> Lift:
    """Lift along the shorter kernel axis, which costs min(cq, ck) dot products per score."""
    lifts_keys = spec.cq <= spec.ck
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    above, _, left, right = (int(extent) for extent in stencil.halo)
    geometry = band(spec)
    row_shift = T - above if lifts_keys else sympy.S.Zero
    key_shift = sympy.S.Zero if lifts_keys else T - left
    shifted = (0, above) if lifts_keys else (-right, left)  # where the shifted operand's gradient reads g
    zero = sympy.S.Zero
    lifted_gradient = Contraction(
        owner="keys" if lifts_keys else "rows",
        sums_terms=False,
        g_row_shift=zero,
        g_key_shift=zero,
        bounds=_contraction_bounds(spec.causal, "keys" if lifts_keys else "rows", (0, 0)),
    )
    shifted_gradient = Contraction(
        owner="rows" if lifts_keys else "keys",
        sums_terms=True,
        g_row_shift=-row_shift,
        g_key_shift=-key_shift,
        bounds=_contraction_bounds(spec.causal, "rows" if lifts_keys else "keys", shifted),
    )
    return Lift(
        lifts_keys=lifts_keys,
        terms=min(spec.kernel),
        taps=max(spec.kernel),
        pad=left if lifts_keys else above,
        row_shift=row_shift,
        key_shift=key_shift,
        carry=above if lifts_keys else 0,
        band_width=geometry.width,
        reach=geometry.reach,
        forward=row_owner_bounds(spec.causal, band=geometry.width),
        scores=key_owner_bounds(spec.causal, band=geometry.width),
        contractions=(lifted_gradient, shifted_gradient),
    )


def _contraction_bounds(causal: bool, owner: str, reads: tuple[int, int]) -> StreamBounds:
    """Bounds for a CTA that reads g at offsets ``reads`` (first, last) of its own block.

    A tile is visited if any of the reads may be allowed, and interior if all of them are: the extreme blocks decide.
    """
    first, last = reads
    if owner == "rows":
        bounds = row_owner_bounds(causal)
        return bounds._replace(
            interior_end=bounds.interior_end.subs(I0, I0 + first), end=bounds.end.subs(I0, I0 + last)
        )
    bounds = key_owner_bounds(causal)
    return bounds._replace(
        begin=bounds.begin.subs(J0, J0 + first), interior_begin=bounds.interior_begin.subs(J0, J0 + last)
    )
