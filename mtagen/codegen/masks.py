"""Texts of Triton kernels about what queries see: by their positions, or by tables of first and last keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..planner.geometry.mask import Mask
from .layout import Batch

# Where row 0 of a strip is in tables; the first row that exists, and the end of these rows; the first key of planes.
_Place: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True)
class ByPosition:
    """A mask that follows from the positions of queries.

    Attributes:
        layout: how tensors hold sequences; texts of the lowering "strip" need none.
        query: the name of the argument by which functions of the mask know a query.
        of: that argument in the docstrings of these functions.
        rows: the kernels' name of the argument for the rows of a tile.
    """

    layout: Batch | None = None
    query: str = "position"
    of: str = "the query at a position"
    rows: str = "positions"

    def at(self, rows: str, entry: str) -> Sequence[str]:
        """Return lines that assign what kernels pass for some rows of a sequence, of a batch entry."""
        return [f"{self.rows} = ({rows})[:, None] + off"]

    def of_product(self, owner: str, rows: str, entry: str) -> Sequence[str]:
        """Return the same lines for a tile of g in a product with g."""
        return self.at(rows, entry)

    def of_tile(self, owner: str, entry: str) -> Sequence[str]:
        """Return the same lines for the rows of a tile, after its positions are known.

        A program that owns rows has assigned it before.
        """
        return []

    def of_step(self, position: str, new: str) -> str:
        """Return what kernels pass for rows of a step of decoding, given their positions and their numbers."""
        return f"({position})[:, None]" if " " in position else f"{position}[:, None]"

    def in_strip(self, rows: str, place: _Place) -> str:
        """Return what kernels of strips pass for rows of a strip."""
        return f"(first + {rows} + off)[:, None]"

    def ends_in_strip(self, row: str, place: _Place) -> str:
        """Return the first key that a row of a strip sees, and the end of its keys, from tables.

        Raises:
            ValueError: there are no tables.
        """
        raise ValueError(row)

    def later(self, query: str, rows: str) -> str:
        """Return what kernels of strips pass for rows that are some rows below a query, for terms of convolutions."""
        return f"{query}{rows}"

    def of_terms(self, positions: str) -> str:
        """Return what kernels of strips pass for the rows of terms of convolutions."""
        return positions

    def of_own_rows(self, rows: str, entry: str) -> Sequence[str]:
        """Return lines before the loop over keys of a program that owns rows."""
        return []

    def of_own_keys(self, entry: str) -> Sequence[str]:
        """Return lines before the loop over rows of a program that owns keys."""
        return []


class InTables(ByPosition):
    """A mask whose first and last key of each query are in memory, and with them the rows that see a key."""

    def at(self, rows: str, entry: str) -> Sequence[str]:
        return [f"{self.rows} = _limits({_tables(self._begin('queries', entry))}, {rows}, 0, n_q, 0)"]

    def of_product(self, owner: str, rows: str, entry: str) -> Sequence[str]:
        return [] if owner == "rows" else self.at(rows, entry)  # without a convolution, rows of g are the owned rows

    def of_tile(self, owner: str, entry: str) -> Sequence[str]:
        return [] if owner == "rows" else self.at("rows", entry)

    def of_step(self, position: str, new: str) -> str:
        return f"_limits({_tables('b * n_new')}, {new}, 0, n_new, 0)"

    def in_strip(self, rows: str, place: _Place) -> str:
        begin, *others = place
        return f"_limits({_tables(begin)}, {rows}, {', '.join(others)})"

    def ends_in_strip(self, row: str, place: _Place) -> str:
        begin, *others = place
        return f"_ends_of_row({_tables(begin)}, {row}, {', '.join(others)})"

    def later(self, query: str, rows: str) -> str:
        return query  # terms need no check: planes are zero where their own row sees no key

    def of_terms(self, positions: str) -> str:
        return "0"

    def of_own_rows(self, rows: str, entry: str) -> Sequence[str]:
        return [*self.at(rows, entry), f"least_first, most_first, least_last, most_last = _extremes({self.rows})"]

    def of_own_keys(self, entry: str) -> Sequence[str]:
        begin = self._begin("keys", entry)
        return [
            f"first_row = tl.load(first_rows_ptr + {begin} + j0)",
            f"end_row = tl.load(end_rows_ptr + {begin} + tl.minimum(j0 + BLOCK_N, n_k) - 1)",
        ]

    def _begin(self, axis: str, entry: str) -> str:
        assert self.layout is not None, "kernels of strips say themselves where their rows begin"
        axes = {"queries": self.layout.queries, "keys": self.layout.keys}
        return axes[axis].begin(entry if self.layout.has_entries else "0")


def _tables(begin: str) -> str:
    """Return the pointers of both tables of queries, from an entry on."""
    return f"first_keys_ptr + {begin}, last_keys_ptr + {begin}"


def masks_of(mask: Mask, layout: Batch | None = None) -> ByPosition:
    """Return the texts for a mask."""
    if not mask.is_tabulated:
        return ByPosition(layout)
    return InTables(layout, "limits", "a query with a first and a last key", "limits")
