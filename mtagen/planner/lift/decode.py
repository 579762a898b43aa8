"""Geometry of split-K decode: the convolution is folded into the queries, and CTAs share the keys.

With the query axis folded, C[j] = sum_v Qhat_v . k[j - pL + v], Qhat_v = scale * sum_u W[u, v]
q[u]. That is one product of ck rows per block of keys, whose diagonals are summed. Terms are
dropped only next to the mask's edges. A CTA owns a range of keys and some pairs (query head, new
query) that share a key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from ...spec import Spec
from ..geometry.mask import Mask

DECODE_ROLES = ("decode", "decode_wide")
LENGTH, N_NEW = sympy.symbols("length n_new", integer=True)
_ROWS = {2: 64, 4: 16}  # element size -> rows (pairs times taps) of the wide kernel's product
_MAX_PAIRS = 16


@dataclass(frozen=True)
class Decode:
    """The geometry of decode for one spec.

    Attributes:
        mask: the mask.
        taps: rows of the product per pair: ck padded to a power of two.
        masks_terms: whether the mask may drop the terms of some query rows at a key and keep those
            of others.
        first_key: first key that any new query sees.
        visible_from, visible_to: all queries whose terms are masked see all keys in [visible_from,
            visible_to).
        narrow, wide: pairs per CTA of the two kernels; equal if there is one kernel.
    """

    mask: Mask
    taps: int
    masks_terms: bool
    first_key: Expr
    visible_from: Expr
    visible_to: Expr
    narrow: int
    wide: int

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the decode kernels."""
        return DECODE_ROLES[: 1 + (self.wide > self.narrow)]


def decode_geometry(spec: Spec) -> Decode:
    """Return the geometry of decode for a spec.

    The narrow kernel is for one new token without grouped heads. The wide kernel takes as many
    pairs as a product holds.
    """
    taps = 1 << (spec.ck - 1).bit_length()
    mask = Mask.of(spec)
    masks_terms = mask.zeroes_scores and spec.cq > 1
    new = LENGTH - N_NEW  # position of the first new query
    rows = new - (spec.cq - 1 if masks_terms else 0), LENGTH - 1
    visible_from, visible_to = sympy.S.Zero, LENGTH
    if (first := mask.first_key(rows[1])) is not None:
        visible_from = first
    if (last := mask.last_key(rows[0])) is not None:
        visible_to = last + 1
    wide = max(1, min(_MAX_PAIRS, _ROWS[spec.itemsize] // taps))
    return Decode(mask, taps, masks_terms, mask.begin(new), visible_from, visible_to, narrow=1, wide=wide)
