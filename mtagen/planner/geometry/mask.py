"""The mask: the keys that a query sees, and from it the conditions for blocks of queries and keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
from sympy import Expr

from ...expressions.bounds import seen_by
from ...expressions.language import POSITION
from ...spec import Spec
from .affine import N_K, Interval, Size


class Comparison(NamedTuple):
    """The comparison ``left`` ``operator`` ``right``, with ``<``, ``<=``, ``>`` or ``>=`` as in
    Python and C.
    """

    left: Expr
    operator: str
    right: Expr


def _condition(spec: Spec) -> str:
    """Return digits of the condition that kernels of a mask in tables check; none if they check none."""
    checked = seen_by(spec.visible, spec.parameters).checked
    read = [pair for pair in spec.parameters if pair[0] in spec.checked_parameters]
    return "" if checked == sympy.true else f"if{hashlib.sha256(f'{checked}{read}'.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Mask:
    """A mask: the query at position p sees the existing keys p - left <= j <= p + right.

    No limit is negative, because a query sees the key at its own position.

    Attributes:
        left: number of keys before its own position that a query sees; None is no limit.
        right: number of keys after its own position that a query sees; None is no limit. Causal
            attention has 0.
        is_tabulated: whether kernels read the first and the last key of each query from memory.
            ``left`` and ``right`` then only bound the mask.
        condition: digits that tell apart the conditions that kernels check for each pair; empty if first
            and last keys say all.
        has_gap: whether kernels skip keys between two runs of keys, which they read from memory, too.
        skips_tiles: whether fused kernels look for a visible pair in each tile first. Conditions that read
            parameters, such as numbers of documents, hide whole tiles; others hide some pairs of most.
        widens: whether only tables hide keys, and only later ones, whose first moves with the query.
        terms: the scores that count in a convolution. ``source``: scores whose own query sees their
            key. ``output``: scores whose key is seen by the query of the convolution's result.
    """

    left: int | None
    right: int | None
    terms: str = "source"
    is_tabulated: bool = False
    condition: str = ""
    has_gap: bool = False
    skips_tiles: bool = False
    widens: bool = False

    @classmethod
    def of(cls, spec: Spec) -> Mask:
        """Return the mask of a request. If both kinds of terms are the same, ``terms`` is
        ``source``.

        They are the same in a convolution over a single row, and in a convolution after the softmax
        if no earlier keys are hidden. In the latter case earlier rows see no key after the last
        that the row of the result sees, and their probabilities of hidden keys are 0.
        """
        after = spec.post_kernel if spec.left is not None else None
        differ = spec.cq > 1 or (after is not None and after[0] > 1)
        terms = spec.mask if differ else "source"
        window = cls(spec.left, spec.right, terms)
        if spec.visible is None:
            return window
        run = seen_by(spec.visible, spec.parameters).run
        return replace(
            window,
            is_tabulated=True,
            condition=_condition(spec),
            has_gap=spec.has_gap,
            skips_tiles=bool(spec.checked_parameters),
            widens=not run.firsts and any(last.has(POSITION) for last in run.lasts),
        )

    @property
    def name(self) -> str:
        """The name of the mask in names of kernels and in tables."""
        before = f"left{self.left}" if self.hides_earlier else ""
        after = {None: "", 0: "causal"}.get(self.right, f"right{self.right}")
        tables = "widening" * self.widens, "tables" * self.is_tabulated
        return "_".join(filter(None, (before, after, *tables, self.condition))) or "full"

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
        return self.hides_later or self.hides_earlier or self.is_tabulated

    @property
    def zeroes_scores(self) -> bool:
        """Whether a convolution takes hidden scores as zeros in all rows of its result."""
        return self.hides and self.terms == "source"

    @property
    def zeroes_terms(self) -> bool:
        """Whether a score may count in one row of a convolution's result and not in another."""
        return self.hides and self.terms == "output"

    @property
    def bounds_keys(self) -> bool:
        """Whether a key that a query sees exists, so that no comparison with n_k is needed."""
        return self.is_tabulated or (self.right is not None and self.right <= 0)

    @property
    def favours_later_rows(self) -> bool:
        """Whether later rows see more keys, so that tiles of rows differ in their work."""
        return (self.hides_later or self.widens) and not self.hides_earlier

    # ---- Limits of one query or key; None where only the ends of the sequence limit it.

    def first_key(self, position: Size) -> Size | None:
        """Return the first key that the query at a position sees."""
        return None if self.left is None else position - self.left

    def begin(self, position: Size) -> Size:
        """Return the first existing key that the query at a position sees."""
        first = self.first_key(position)
        return sympy.S.Zero if first is None else sympy.Max(0, first)

    def last_key(self, position: Size) -> Size | None:
        """Return the last key that the query at a position sees."""
        return None if self.right is None else position + self.right

    def first_position(self, key: Size) -> Size | None:
        """Return the first position whose query sees a key."""
        return None if self.right is None else key - self.right

    def last_position(self, key: Size) -> Size | None:
        """Return the last position whose query sees a key."""
        return None if self.left is None else key + self.left

    def visible(self, position: Size, key: Size, last_position: Size | None = None) -> tuple[Comparison, ...]:
        """Return comparisons that all hold iff the query at a position sees a key that exists.

        With ``last_position``, they hold iff any query from ``position`` to there sees the key.

        Raises:
            ValueError: only tables say it.
        """
        self._check_limits()
        first, last = self.first_key(position), self.last_key(position if last_position is None else last_position)
        seen = () if first is None else (Comparison(key, ">=", first),)
        return seen if last is None else (*seen, Comparison(key, "<=", last))

    def _check_limits(self) -> None:
        if self.is_tabulated:
            raise ValueError(f"{self.name}: the limits do not decide which keys a query sees")

    # ---- Conditions for blocks, which are given by their first and last position or key.

    def hidden(self, positions: Interval, keys: Interval, *, n_k: Size | None = N_K) -> tuple[Comparison, ...]:
        """Return comparisons of which at least one holds iff some pair (position, key) is hidden or
        past the keys.

        ``mask.hidden((p, p), (j, j))`` is the rule for a single pair. Negative keys are not
        checked, and keys past the end are not checked if ``n_k`` is None.

        Raises:
            ValueError: only tables say it.
        """
        self._check_limits()
        (first_position, last_position), (first_key, last_key) = positions, keys
        comparisons = []
        if (limit := self.last_key(first_position)) is not None:
            comparisons.append(Comparison(last_key, ">", limit))
        if n_k is not None and not self.bounds_keys:
            comparisons.append(Comparison(last_key, ">=", n_k))
        if (limit := self.first_key(last_position)) is not None:
            comparisons.append(Comparison(first_key, "<", limit))
        return tuple(comparisons)
