"""Columns of tables of cases: the description of a case, and the figures of contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..measure.cases import Case
from .names import name_kernel
from .runs import Row, Rows
from .tables import Table

NOTHING = "–"  # not measured


class Column(NamedTuple):
    """A column of a table with a line for each case.

    Attributes:
        name: text in the header.
        cell: returns the text for a case and its measurements.
    """

    name: str
    cell: Callable[[Case, Rows], str]


def table_of_cases(title: str, columns: Sequence[Column], cases: Mapping[Case, Rows], keys: int = 0) -> Table:
    """Return a table with a line for each case."""
    lines = [[column.cell(case, rows) for column in columns] for case, rows in cases.items()]
    return Table(title, [column.name for column in columns], lines, keys)


KERNEL = Column("kernel", lambda case, rows: name_kernel(case))
STAGES = KERNEL._replace(name="stages")
HEAD_DIM = Column("d", lambda case, rows: str(case.spec.head_dim))
BATCH = Column("B", lambda case, rows: str(case.sizes.batch))
LENGTH = Column("N", lambda case, rows: str(case.sizes.nk))
CACHE_LENGTH = Column("Nk", lambda case, rows: str(case.sizes.nk))
KV_HEADS = Column("heads of keys", lambda case, rows: str(case.sizes.kv_heads))
NEW_TOKENS = Column("new tokens", lambda case, rows: str(case.sizes.nq))
PASS = Column("pass", lambda case, rows: case.pass_name)


def figures_of(name: str, title: str, key: str = "ms") -> Column:
    """Return a column with one figure of a contender's measurements."""
    return Column(title, lambda case, rows: figure(rows.get(name), key))


def number(x: float) -> str:
    """Format a number with three digits, or as many as its integer part has."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def figure(row: Row | None, key: str = "ms") -> str:
    """Format one figure of a measurement, if there is one."""
    return NOTHING if row is None or row.get(key) is None else number(row[key])


def ratio(over: Row | None, under: Row | None, digits: int = 2) -> str:
    """Format the time of one measurement over that of another, if there are both."""
    return f"{over['ms'] / under['ms']:.{digits}f}" if over and under else NOTHING
