"""Texts of Triton kernels about what queries see: by their positions, or by tables of first and last keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..planner.geometry.mask import Mask
from ..planner.geometry.pairs import PairCondition
from .layout import Batch


class StripRows(NamedTuple):
    """Names in kernels for the rows of a strip. Templates write them as a tuple.

    Attributes:
        table_index: index of the strip's row 0 in the mask's tables.
        first_row: first row of the strip that exists.
        end_row: end of the rows that exist.
        first_key: the sequence's key that is key 0 of planes.
        entry: the batch entry or document.
    """

    table_index: str
    first_row: str
    end_row: str
    first_key: str
    entry: str

    def limits(self, row: str) -> str:
        """Return the arguments of functions that read the first and the last key of ``row``."""
        return f"{_tables(self.table_index)}, {row}, {self.first_row}, {self.end_row}, {self.first_key}"


@dataclass(frozen=True)
class ByPosition:
    """A mask that follows from the positions of queries.

    Attributes:
        layout: how tensors hold sequences; texts of the lowering "strip" need none.
        query: name of the mask functions' query parameter.
        of: description of that parameter, for generated docstrings.
        rows: kernel variable that holds it for a tile's rows.
    """

    layout: Batch | None = None
    query: str = "position"
    of: str = "the query at a position"
    rows: str = "positions"

    def at(self, rows: str, entry: str) -> Sequence[str]:
        """Return code that assigns the query variable for ``rows`` of batch entry ``entry``."""
        return [f"{self.rows} = ({rows})[:, None] + off"]

    def of_product(self, owner: str, rows: str, entry: str) -> Sequence[str]:
        """Return code that assigns the query variable in the kernels that multiply by g."""
        return self.at(rows, entry)

    def of_tile(self, owner: str, entry: str) -> Sequence[str]:
        """Return code that assigns the query variable for a tile's rows, after their positions.

        Empty if the program owns rows, because it assigned the variable before its loop.
        """
        return []

    def of_step(self, position: str, new: str) -> str:
        """Return the query of a decode step's rows, given their positions and their numbers."""
        return f"({position})[:, None]" if " " in position else f"{position}[:, None]"

    def in_strip(self, rows: str, strip: Sequence[str]) -> str:
        """Return the query of a strip's ``rows``, given its fields of :class:`StripRows`."""
        return f"(first + {rows} + off)[:, None]"

    def ends_in_strip(self, row: str, strip: Sequence[str]) -> str:
        """Return code for the first key that a row of a strip sees and for the end of its keys.

        Raises:
            ValueError: the mask has no tables.
        """
        text = f"row {row} of a strip has no tables of keys, because its mask is a window"
        raise ValueError(text)

    def pairs_in_strip(self, row: str, strip: Sequence[str]) -> Sequence[str]:
        """Return code that assigns what a condition needs of a row of a strip; empty without one."""
        return []

    def later(self, query: str, rows: str) -> str:
        """Return the query ``rows`` below ``query``, to mask a convolution's terms."""
        return f"{query}{rows}"

    def of_terms(self, positions: str) -> str:
        """Return the query at ``positions``, to mask a convolution's terms."""
        return positions

    def of_own_rows(self, rows: str, entry: str) -> Sequence[str]:
        """Return the code before the loop over keys of a program that owns rows."""
        return []

    def of_own_keys(self, entry: str) -> Sequence[str]:
        """Return the code before the loop over rows of a program that owns keys."""
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

    def in_strip(self, rows: str, strip: Sequence[str]) -> str:
        return f"_limits({StripRows(*strip).limits(rows)})"

    def ends_in_strip(self, row: str, strip: Sequence[str]) -> str:
        return f"_ends_of_row({StripRows(*strip).limits(row)})"

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


@dataclass(frozen=True)
class Checked(InTables):
    """A mask in tables that checks a condition for each pair besides.

    A query is a pair: its first and last key, and what the condition needs of it.

    Attributes:
        has_gap: whether loops skip keys between two runs.
        condition: the condition.
    """

    has_gap: bool = False
    condition: PairCondition = field(default_factory=PairCondition)

    def at(self, rows: str, entry: str) -> Sequence[str]:
        (limits,) = super().at(rows, entry)
        name, _, limits = limits.partition(" = ")
        assert self.layout is not None, "kernels of strips say themselves where their rows are"
        sequence = entry if self.layout.has_entries else "sequence"
        return [f"{name} = ({limits}, {self._pairs(f'({rows})[:, None] + off', '0', sequence, 'n_k')})"]

    def of_step(self, position: str, new: str) -> str:
        own = super(InTables, self).of_step(position, new)
        return f"({super().of_step(position, new)}, {self._pairs(own, '0', 'b', 'n_max')})"

    def in_strip(self, rows: str, strip: Sequence[str]) -> str:
        return f"({super().in_strip(rows, strip)}, {self._in_strip(f'(first + {rows} + off', strip, ')[:, None]')})"

    def pairs_in_strip(self, row: str, strip: Sequence[str]) -> Sequence[str]:
        return [f"pairs = {self._in_strip(f'first + {row} + off', strip)}"]

    def of_own_rows(self, rows: str, entry: str) -> Sequence[str]:
        extremes = f"least_first, most_first, least_last, most_last = _extremes({self.rows}[0])"
        begin = self._begin("queries", entry)
        tables = f"first_hidden_ptr + {begin}, last_hidden_ptr + {begin}"
        gap = f"most_first_hidden, least_last_hidden = _extremes_of_gaps({tables}, {rows}, n_q)"
        return [*self.at(rows, entry), extremes, *([gap] * self.has_gap)]

    def of_own_keys(self, entry: str) -> Sequence[str]:
        begin = self._begin("keys", entry)
        gap = [
            f"first_hidden_row = tl.load(first_hidden_rows_ptr + {begin} + tl.minimum(j0 + BLOCK_N, n_k) - 1)",
            f"end_hidden_row = tl.load(end_hidden_rows_ptr + {begin} + j0)",
        ]
        return [*super().of_own_keys(entry), *(gap if self.has_gap else [])]

    def _in_strip(self, position: str, strip: Sequence[str], shape: str = "") -> str:
        fields = StripRows(*strip)
        position = f"{position} + {fields.first_key}{shape}"
        return self._pairs(position, fields.first_key, fields.entry, "tokens")

    def _pairs(self, position: str, first_key: str, entry: str, tokens: str) -> str:
        """Return what the condition needs of queries at ``position``, counted like keys from the sequence's first."""
        views = self.condition.views
        read = [entry] * any(view.has_entries for view in views) + [tokens] * self.condition.reads_tokens
        read += [f"{view.argument}_ptr" for view in views]
        return f"_pairs({', '.join((position, first_key, *read))})"


def _tables(begin: str) -> str:
    """Return the pointers of both tables of queries, from an entry on."""
    return f"first_keys_ptr + {begin}, last_keys_ptr + {begin}"


def masks_of(mask: Mask, condition: PairCondition, layout: Batch | None = None) -> ByPosition:
    """Return the texts for a mask and the condition that it checks."""
    if not mask.is_tabulated:
        return ByPosition(layout)
    if mask.condition:
        query = "query", "a query with what the mask needs of it", "query"
        return Checked(layout, *query, has_gap=mask.has_gap, condition=condition)
    return InTables(layout, "limits", "a query with a first and a last key", "limits")
