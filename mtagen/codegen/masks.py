"""Texts of Triton kernels about what queries see: by their positions, or by tables of first and last keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.geometry.mask import Mask
from .layout import Batch


@dataclass(frozen=True)
class ByPosition:
    """A mask that follows from the positions of queries.

    Attributes:
        layout: how tensors hold sequences; texts of the lowering "strip" need none.
        query: what functions of the mask take for a query.
        of: the query in the documentation of these functions.
        rows: the kernels' name for what they pass for the rows of a tile.
    """

    layout: Batch | None = None
    query: str = "position"
    of: str = "the query at a position"
    rows: str = "positions"

    def at(self, rows: str, entry: str) -> Sequence[str]:
        """Return lines that assign what kernels pass for some rows of a sequence, of a batch entry."""
        return [f"{self.rows} = ({rows})[:, None] + off"]

    def of_tile(self, owner: str, entry: str) -> Sequence[str]:
        """Return the same lines for the rows of a tile, after its positions are known.

        A program that owns rows has assigned it before.
        """
        return []

    def of_step(self, position: str, new: str) -> str:
        """Return what kernels pass for rows of a step of decoding, given their positions and their numbers."""
        return f"({position})[:, None]" if " " in position else f"{position}[:, None]"

    def of_own_rows(self, rows: str, entry: str) -> Sequence[str]:
        """Return lines before the loop over keys of a program that owns rows."""
        return []

    def of_own_keys(self, entry: str) -> Sequence[str]:
        """Return lines before the loop over rows of a program that owns keys."""
        return []


class InTables(ByPosition):
    """A mask whose first and last key of each query are in memory, and with them the rows that see a key."""

    def at(self, rows: str, entry: str) -> Sequence[str]:
        tables = ", ".join(f"{name}_ptr + {self._begin('queries', entry)}" for name in ("first_keys", "last_keys"))
        return [f"{self.rows} = _limits({tables}, {rows}, n_q)"]

    def of_tile(self, owner: str, entry: str) -> Sequence[str]:
        return [] if owner == "rows" else self.at("rows", entry)

    def of_step(self, position: str, new: str) -> str:
        return f"_limits(first_keys_ptr + b * n_new, last_keys_ptr + b * n_new, {new}, n_new)"

    def of_own_rows(self, rows: str, entry: str) -> Sequence[str]:
        return [*self.at(rows, entry), f"least_first, most_first, least_last, most_last = _extremes({self.rows})"]

    def of_own_keys(self, entry: str) -> Sequence[str]:
        begin = self._begin("keys", entry)
        return [
            f"first_row = tl.load(first_rows_ptr + {begin} + j0)",
            f"end_row = tl.load(end_rows_ptr + {begin} + tl.minimum(j0 + BLOCK_N, n_k) - 1)",
        ]

    def _begin(self, axis: str, entry: str) -> str:
        assert self.layout is not None, "only the lowering lift reads tables"
        axes = {"queries": self.layout.queries, "keys": self.layout.keys}
        return axes[axis].begin(entry if self.layout.has_entries else "0")


def masks_of(mask: Mask, layout: Batch | None = None) -> ByPosition:
    """Return the texts for a mask."""
    if not mask.is_tabulated:
        return ByPosition(layout)
    return InTables(layout, "limits", "a query with a first and a last key", "limits")
