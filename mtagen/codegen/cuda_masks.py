"""Conditions in CUDA kernels of the lowering "tile" that keys are hidden: by positions, or by tables of keys."""

from __future__ import annotations

from dataclasses import dataclass

from sympy import Symbol

from ..planner.geometry.affine import N_K, Size
from ..planner.geometry.mask import Comparison, Mask
from .printers import Source, c_code


@dataclass(frozen=True)
class ByPosition:
    """A mask that follows from the positions of queries.

    Attributes:
        mask: the keys that queries see.
        warp: the parameter of functions that mask a warp's 16 rows.
    """

    mask: Mask
    warp: str = "int position"

    def rows(self, tile: str = "") -> str:
        """Return the argument for that parameter, for a warp's tile of rows if it has several."""
        return f"position + 16 * {tile}" if tile else "position"

    def hides_some(self, key: str, last_key: str) -> str:
        """Return the condition that some of the keys is hidden from some row of the warp."""
        return hidden(self.mask, ("position", "position + 15"), (key, last_key))

    def hides(self, row: str, key: str) -> str:
        """Return the condition that a key is hidden from a lane's first or second row."""
        return hidden(self.mask, f"position + 2 * (lane >> 2) + ({row})", key)

    # ---- Kernels whose CTAs own keys: `row` is a step's first row.

    def hides_columns(self, row: str) -> str:
        """Return the condition that some of a CTA's or warp's columns is hidden from some row."""
        return f"cta.hides({row})"

    def hides_column(self, row: str, column: str, ahead: str) -> str:
        """Return the condition that a column is hidden from a lane's first or second row.

        Args:
            row: 0 or 1.
            column: counted from the lane's first.
            ahead: the same key less the row's position.
        """
        return f"is_hidden({ahead})"


class InTables(ByPosition):
    """A mask whose first and last key of each query are in memory."""

    def rows(self, tile: str = "") -> str:
        return f"rows[{tile}]" if tile else "rows"

    def hides_some(self, key: str, last_key: str) -> str:
        return f"rows.hide_some({key}, {last_key})"

    def hides(self, row: str, key: str) -> str:
        return f"own[{row}].hides({key})"

    def hides_columns(self, row: str) -> str:
        return "hidden.any()"

    def hides_column(self, row: str, column: str, ahead: str) -> str:
        return f"hidden.of({row}, {column})"


def cuda_masks_of(mask: Mask) -> ByPosition:
    """Return the conditions for a mask."""
    return InTables(mask, "const WarpRows& rows") if mask.is_tabulated else ByPosition(mask)


def hidden(mask: Mask, position: str | tuple[str, str], key: str | tuple[str, str], *, n_k: Size | None = N_K) -> str:
    """Return the condition that a key is hidden from the query at a position, or is past the keys.

    For blocks, given by the first and the last position or key, it is the condition that some key
    is hidden from some query. See :meth:`Mask.hidden`.
    """
    positions, keys = (_interval(x) for x in (position, key))
    return " || ".join(map(_comparison, mask.hidden(positions, keys, n_k=n_k)))


def visible(mask: Mask, position: str, key: str) -> str:
    """Return the condition that the query at a position sees a key that exists."""
    return " && ".join(map(_comparison, mask.visible(Source(position), Source(key)))) or "true"


def _interval(ends: str | tuple[str, str]) -> tuple[Symbol, Symbol]:
    first, last = (ends, ends) if isinstance(ends, str) else ends
    return Source(first), Source(last)


def _comparison(comparison: Comparison) -> str:
    left, operator, right = comparison
    return f"{c_code(left)} {operator} {c_code(right)}"
