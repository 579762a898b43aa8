"""Split-K decode: the convolution folded into the queries, the keys shared out among many CTAs.

With the query axis folded, C[j] = sum_v Qhat_v . k[j - pL + v], Qhat_v = scale * sum_u W[u, v] q[u]: one
product of ck rows per key tile, whose diagonals are summed. Only next to the mask's edges are terms
dropped. Besides keys, what a CTA owns is pairs (query head, new query) that share their key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from ...spec import Spec
from ..geometry.mask import Mask

DECODE_ROLES = ("decode", "decode_wide")
LENGTH, N_NEW = sympy.symbols("length n_new", integer=True)
_ROWS = {2: 64, 4: 16}  # by element size: rows (pairs times taps) of the wide kernel's product
_MAX_PAIRS = 16


@dataclass(frozen=True)
class Decode:
    """The geometry of decode for one spec.

    Attributes:
        mask: which keys a query sees.
        taps: ck padded to a power of two: rows of the product per pair.
        masks_terms: whether the mask drops some query rows' terms at a key and keeps others'.
        first_key: the first key that some new query sees.
        seen_from, seen_to: every query whose terms are masked sees the keys from the one to before the other.
        narrow, wide: pairs per CTA of the two kernels; the same if one kernel does.
    """

    mask: Mask
    taps: int
    masks_terms: bool
    first_key: Expr
    seen_from: Expr
    seen_to: Expr
    narrow: int
    wide: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The kernels there are."""
        return DECODE_ROLES[: 1 + (self.wide > self.narrow)]


def decode_geometry(spec: Spec) -> Decode:
    """Narrow is for one new token without grouped heads; wide takes what one product holds."""
    taps = 1 << (spec.ck - 1).bit_length()
    mask = Mask.of(spec)
    masks_terms = mask.zeroes_scores and spec.cq > 1
    new = LENGTH - N_NEW  # position of the first new query
    rows = new - (spec.cq - 1 if masks_terms else 0), LENGTH - 1
    seen_from, seen_to = sympy.S.Zero, LENGTH
    if (first := mask.first_key(rows[1])) is not None:
        seen_from = first
    if (last := mask.last_key(rows[0])) is not None:
        seen_to = last + 1
    wide = max(1, min(_MAX_PAIRS, _ROWS[spec.itemsize] // taps))
    return Decode(mask, taps, masks_terms, mask.begin(new), seen_from, seen_to, narrow=1, wide=wide)
