"""The "lift" lowering: the convolution folded into one operand, so that a score is a sum of dot products.

With keys lifted (cq <= ck), C[i, j] = sum_t q[i + t - (cq-1)] . Khat_t[j],
Khat_t[j] = scale * sum_s W[t, s] k[j + s - pL];
with queries lifted, the same with the axes exchanged: C[i, j] = sum_t Qhat_t[i] . k[j + t - pL],
Qhat_t[i] = scale * sum_s W[s, t] q[i + s - (cq-1)]. Scores next to the mask's
edges are made otherwise (see :mod:`.band`).
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
    loop: Loop

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
        carried_rows: rows of g that a chunk of rows needs from the chunk before it.
        mask: which keys a query sees.
        bands: where the lifted score is not used.
        forward, scores: loops of the kernels of these names.
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
    forward: Loop
    scores: Loop
    contractions: tuple[Contraction, Contraction]


@cache
def lift(spec: Spec) -> Lift:
    """Lift along the shorter kernel axis, which costs min(cq, ck) dot products per score."""
    lifts_keys = spec.cq <= spec.ck
    stencil = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
    above, _, left, right = (int(extent) for extent in stencil.halo)
    mask, width = Mask.of(spec), max((band.width for band in bands(spec)), default=0)
    row_shift = T - above if lifts_keys else sympy.S.Zero
    key_shift = sympy.S.Zero if lifts_keys else T - left
    shifted = (0, above) if lifts_keys else (-right, left)  # where the shifted operand's gradient reads g
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
        forward=key_loop(mask, band=width),
        scores=row_loop(mask, band=width),
        contractions=(lifted_gradient, shifted_gradient),
    )


def _contraction_loop(mask: Mask, owner: str, reads: tuple[int, int]) -> Loop:
    """The loop of a CTA that reads g at offsets ``reads`` (first, last) of its own block.

    A tile is visited if any of the reads may be visible, and interior if all of them are: the extreme blocks decide.
    """
    if not mask.hides:  # then nothing is checked: the operand that g meets is zero past its end
        length = N_K if owner == "rows" else N_Q
        return Loop(sympy.S.Zero, sympy.S.Zero, length, length)
    first, last = reads
    own, loop = (I0, key_loop(mask)) if owner == "rows" else (J0, row_loop(mask))
    begin, end = loop.begin.subs(own, own + first), loop.end.subs(own, own + last)
    interior_begin = loop.interior_begin.subs(own, own + last)
    interior_end = loop.interior_end.subs(own, own + first)
    if mask.hides_earlier:  # in a narrow window the extreme blocks' interiors need not meet
        interior_end = Max(begin, interior_end)
        interior_begin = Max(begin, Min(interior_begin, interior_end))
    return Loop(begin, interior_begin, interior_end, end)
