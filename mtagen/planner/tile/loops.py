"""The first and last rows or keys that a CTA's loop needs, by the mask, in the templates' names."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr, Min, floor, symbols

from ...spec import DROPOUT_GROUP, Spec
from ..cuda.toeplitz import CHUNK
from ..geometry.affine import N_K, N_Q
from ..geometry.mask import Mask

# A CTA's work in the forward pass: its first row, and the number of rows from it on.
_FIRST, _FIRST_ROWS = symbols("first rows", integer=True)
_C0, _ROW_HALO = symbols("c0 ROW_HALO", integer=True)  # the first column of a CTA in the backward pass
_OFFSET = sympy.Symbol("offset", integer=True)
# Of a mask in tables: the first key that any of a CTA's rows sees and the end of these keys; the first row that sees
# one of a CTA's columns and the end of these rows.
FIRST_SEEN, END_SEEN = symbols("first_seen end_seen", integer=True, nonnegative=True)
_FIRST_ROW, _END_ROW = symbols("first_row end_row", integer=True, nonnegative=True)


@dataclass(frozen=True)
class KeyLoop:
    """The loop of the forward pass over keys.

    Attributes:
        spec: the request.
        shift: keys by which a CTA begins later than the first key that its rows see.
    """

    spec: Spec
    shift: Expr = sympy.S.Zero

    @property
    def begin(self) -> Expr:
        """First key of a CTA's key loop: the beginning of a chunk or dropout group."""
        mask, first_row = Mask.of(self.spec), _FIRST + self.spec.cq - 1
        if mask.is_tabulated:
            begin = sympy.Max(0, Min(FIRST_SEEN - self.spec.pad_left, END_SEEN))
        else:
            begin = mask.begin(first_row + N_K - N_Q - self.spec.pad_left)
        multiple = DROPOUT_GROUP if self.spec.dropout else CHUNK
        return multiple * floor(begin / multiple) + self.shift

    @property
    def end(self) -> Expr:
        """End of the keys that any of a CTA's first ``rows`` rows sees; of all rows, if the mask has tables."""
        mask = Mask.of(self.spec)
        if mask.is_tabulated:
            return END_SEEN
        last = mask.last_key(_FIRST + _FIRST_ROWS - 1 + _OFFSET)
        return N_K if last is None else Min(N_K, last + 1)


@dataclass(frozen=True)
class RowLoop:
    """The loop of the backward pass over rows of queries.

    Attributes:
        mask: the mask.
        keys: columns of S.
    """

    mask: Mask
    keys: int

    @property
    def begin(self) -> Expr:
        """First query row that the CTA needs.

        Earlier rows see none of its keys, directly or through the convolution.
        """
        if self.mask.is_tabulated:
            return Min(_FIRST_ROW, _END_ROW)
        position = self.mask.first_position(_C0)
        if position is None:
            return sympy.S.Zero
        return sympy.Max(0, position - _OFFSET - (_ROW_HALO if self.mask.zeroes_terms else 0))

    @property
    def end(self) -> Expr:
        """End of the query rows that the CTA needs: later rows see none of its keys."""
        if self.mask.is_tabulated:
            return _END_ROW
        position = self.mask.last_position(_C0 + self.keys - 1)
        return N_Q if position is None else sympy.Min(N_Q, position - _OFFSET + 1)

    @property
    def may_end_early(self) -> bool:
        """Whether the last rows may see none of the CTA's keys."""
        return self.mask.hides_earlier or self.mask.is_tabulated
