"""Split-K decode: the convolution folded into the queries, the keys shared out among many CTAs.

With the query axis folded, C[j] = sum_v Qhat_v . k[j - pL + v], Qhat_v = scale * sum_u W[u, v] q[u]: one
product of ck rows per key tile, whose diagonals are summed. Only near the end of the keys does causality
drop terms. Besides keys, what a CTA owns is pairs (query head, new query) that share their key head.
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
        masks_terms: whether the causal rule drops some query rows' terms at a key and keeps others'.
        first_edge: the first key that some query must not see.
        narrow, wide: pairs per CTA of the two kernels; the same if one kernel does.
    """

    mask: Mask
    taps: int
    masks_terms: bool
    first_edge: Expr
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
    first_position = LENGTH - N_NEW - (spec.cq - 1 if masks_terms else 0)
    first_edge = LENGTH
    if (last := mask.last_key(first_position)) is not None:
        first_edge = last + 1
    return Decode(
        mask, taps, masks_terms, first_edge, narrow=1, wide=max(1, min(_MAX_PAIRS, _ROWS[spec.itemsize] // taps))
    )
