"""Geometry of split-K decode: the convolution is folded into the queries, and CTAs share the keys.

With the query axis folded, C[j] = sum_v Qhat_v . k[j - pL + v], Qhat_v = scale * sum_u W[u, v]
q[u]. That is one product of ck rows per block of keys, whose diagonals are summed. Terms are
dropped only next to the mask's edges. A CTA owns a range of keys and some pairs (query head, new
query) that share a key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import sympy
from sympy import Expr

from ...spec import Spec
from ..geometry.loops import BLOCK_N, J0
from ..geometry.mask import Comparison, Mask
from ..sizes import N_NEW

DECODE_ROLES = ("decode", "decode_wide")
LENGTH, KEY = sympy.symbols("length key", integer=True)
_ROWS = {2: 64, 4: 16}  # element size -> rows (pairs times taps) of the wide kernel's product
_MAX_PAIRS = 16


class Edge(NamedTuple):
    """An edge of the keys that all queries see whose terms are masked.

    Attributes:
        name: name of the edge in the kernel.
        limit: where the edge is.
        meaning: what it is, for a comment.
        hides: holds for a tile from j0 on if the edge hides a key of it from some query.
        sees: holds for a key that is on the visible side.
    """

    name: str
    limit: Expr
    meaning: str
    hides: Comparison
    sees: Comparison


@dataclass(frozen=True)
class Decode:
    """The geometry of decode for one spec.

    Attributes:
        mask: the mask.
        taps: rows of the product per pair: ck padded to a power of two.
        masks_terms: whether the mask may drop the terms of some query rows at a key and keep those
            of others.
        first_key: first key that any new query sees.
        edges: the edges of the keys that all queries see, if ``masks_terms``.
        narrow, wide: pairs per CTA of the two kernels; equal if there is one kernel.
    """

    mask: Mask
    taps: int
    masks_terms: bool
    first_key: Expr
    edges: tuple[Edge, ...]
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
    wide = max(1, min(_MAX_PAIRS, _ROWS[spec.itemsize] // taps))
    edges = tuple(_edges(mask, new - (spec.cq - 1), LENGTH - 1)) if masks_terms else ()
    return Decode(mask, taps, masks_terms, mask.begin(new), edges, narrow=1, wide=wide)


def _edges(mask: Mask, first_position: Expr, last_position: Expr) -> Iterator[Edge]:
    """Yield the edges of the keys that the queries at these and all positions between them see."""
    if (first := mask.first_key(last_position)) is not None:
        limit = sympy.Symbol("visible_from", integer=True)
        hides, sees = Comparison(J0, "<", limit), Comparison(KEY, ">=", limit)
        yield Edge(limit.name, first, "all query rows that the filter reads see keys from here on", hides, sees)
    if (last := mask.last_key(first_position)) is not None:
        limit = sympy.Symbol("visible_to", integer=True)
        hides, sees = Comparison(J0 + BLOCK_N, ">", limit), Comparison(KEY, "<", limit)
        yield Edge(limit.name, last + 1, "all query rows that the filter reads see keys before it", hides, sees)
