"""Which keys a query sees, as one value; what tiles of queries and keys see of each other follows from its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import sympy
from sympy import Expr

from ...spec import Spec
from .affine import N_K, Interval, Size


class Comparison(NamedTuple):
    """``left`` ``operator`` ``right``, where the operator is ``<``, ``<=``, ``>`` or ``>=``, as in Python and C."""

    left: Expr
    operator: str
    right: Expr


@dataclass(frozen=True)
class Mask:
    """The query at position p sees the keys p - left <= j <= p + right, of those that exist.

    No limit is negative: a query sees the key at its own position.

    Attributes:
        left: keys before its own position that a query sees; None is no limit.
        right: keys after it; None is no limit. Causal attention has 0.
        terms: which scores count in a convolution: ``source``, those whose own query sees their key, or ``output``,
            those whose key the query of the convolution's result sees.
    """

    left: int | None
    right: int | None
    terms: str = "source"

    @classmethod
    def of(cls, spec: Spec) -> Mask:
        """The mask of a request. Where both kinds of terms are the same, they are ``source``.

        They are in a convolution over a single row, and in one after the softmax unless earlier keys are hidden: rows
        before see no key after the last that the row of the result sees, and what they do not see is 0.
        """
        after = spec.post_kernel if spec.left is not None else None
        differ = spec.cq > 1 or (after is not None and after[0] > 1)
        return cls(left=spec.left, right=spec.right, terms=spec.mask if differ else "source")

    @property
    def name(self) -> str:
        """In names of kernels and in tables."""
        before = f"left{self.left}" if self.hides_earlier else ""
        after = {None: "", 0: "causal"}.get(self.right, f"right{self.right}")
        return "_".join(filter(None, (before, after))) or "full"

    @property
    def hides_later(self) -> bool:
        """Whether keys after a query are hidden from it."""
        return self.right is not None

    @property
    def hides_earlier(self) -> bool:
        """Whether keys before a query are hidden from it."""
        return self.left is not None

    @property
    def hides(self) -> bool:
        """Whether some key is hidden from some query."""
        return self.hides_later or self.hides_earlier

    @property
    def zeroes_scores(self) -> bool:
        """Whether a convolution takes hidden scores as zeros, whatever row of outputs it makes."""
        return self.hides and self.terms == "source"

    @property
    def zeroes_terms(self) -> bool:
        """Whether a score counts in some rows of outputs and not in others."""
        return self.hides and self.terms == "output"

    @property
    def bounds_keys(self) -> bool:
        """Whether no query sees past its own position, so that none needs a comparison with the number of keys."""
        return self.right is not None and self.right <= 0

    @property
    def favours_later_rows(self) -> bool:
        """Whether later rows see more keys, so that tiles of rows differ in their work."""
        return self.hides_later and not self.hides_earlier

    # ---- Of one query or key; None where nothing but the ends of the sequence limits it.

    def first_key(self, position: Size) -> Size | None:
        """The first key that the query at a position sees."""
        return None if self.left is None else position - self.left

    def begin(self, position: Size) -> Size:
        """Where the keys begin that the query at a position sees, of those that exist."""
        first = self.first_key(position)
        return sympy.S.Zero if first is None else sympy.Max(0, first)

    def last_key(self, position: Size) -> Size | None:
        """The last key that the query at a position sees."""
        return None if self.right is None else position + self.right

    def first_position(self, key: Size) -> Size | None:
        """The first position whose query sees a key."""
        return None if self.right is None else key - self.right

    def last_position(self, key: Size) -> Size | None:
        """The last position whose query sees a key."""
        return None if self.left is None else key + self.left

    # ---- Of tiles, which are given by their first and last position or key.

    def hidden(self, positions: Interval, keys: Interval, *, n_k: Size | None = N_K) -> tuple[Comparison, ...]:
        """Comparisons of which one holds if and only if some pair of a position and a key is hidden or past the keys.

        ``mask.hidden((p, p), (j, j))`` is the rule for a single pair. Keys before the first are not looked for,
        nor are those past the keys where ``n_k`` is None.
        """
        (first_position, last_position), (first_key, last_key) = positions, keys
        comparisons = []
        if (limit := self.last_key(first_position)) is not None:
            comparisons.append(Comparison(last_key, ">", limit))
        if n_k is not None and not self.bounds_keys:
            comparisons.append(Comparison(last_key, ">=", n_k))
        if (limit := self.first_key(last_position)) is not None:
            comparisons.append(Comparison(first_key, "<", limit))
        return tuple(comparisons)
