"""Output of ``mtagen bench``: the tables of a run, and its comparison with an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from . import columns
from .columns import Column, number, table_of_cases
from .compare import Pair
from .names import OURS, SDPA, is_ours, name_group, name_size, ordered
from .runs import Cases, Row, Rows, Run, fastest, groups, measurements, skipped, source
from .tables import Table, open_console, print_table, say

NOTABLE_SPREAD = 0.05  # of the median, between the quantiles

_EXTRA = {"peak_MiB": "peak MiB", "cpu_us": "CPU time of a call, us", "graph_ms": "in a CUDA graph, ms"}

_Cell = Callable[[Row, Rows], str]  # text for one contender's measurement, given the measurements of all


def print_run(run: Run, console: Console | None = None) -> None:
    """Print a run: a table of times for each pass, mask and head dim, and a table of other
    measurements.

    Below a table are the skipped measurements, with the reasons.
    """
    console = console or open_console()
    say(source(run), console)
    if rates := run["rates"]:
        say(f"measured rates: {number(rates['tensor_tflops'])} TFLOP/s, {number(rates['dram_gbps'])} GB/s", console)
    say("in a cell: ms, x of the fastest SDPA; TFLOP/s (decode: GB/s), % of the roofline; spread above 5 %", console)
    for title, cases in groups(measurements(run)).items():
        tables = [_table(title, cases, _time_cell)]
        tables += [_table(f"{name}: {title}", cases, partial(_extra_cell, key)) for key, name in _EXTRA.items()]
        for table in filter(None, tables):
            print_table(table, console)
    console.print()
    if lost := _lost(measurements(run)):
        say(lost, console)
    for line in skipped(run["results"]):
        say(f"skipped: {line}", console)


def _lost(cases: Cases) -> str:
    """Say in how many cases mtagen took longer than eager; empty where in none."""
    both = [(ours, rows["eager"]) for rows in cases.values() if "eager" in rows and (ours := fastest(rows, OURS))]
    slower = sum(ours["ms"] > eager["ms"] for ours, eager in both)
    if not slower:
        return ""
    why = "whole scores of short sequences are cheap; on a CPU mtagen's tiled PyTorch ops save memory rather than time"
    return f"mtagen takes longer than eager in {slower} of {len(both)} cases: {why}"


def print_comparison(slower: Sequence[Pair], compared: int, console: Console | None = None) -> None:
    """Print which of ``compared`` measurements are slower than they were."""
    console = console or open_console()
    if slower:
        header = ("case", "contender", "before, ms", "now, ms", "ratio")
        lines = [
            (
                f"{name_group(pair.case)}, {name_size(pair.case)}",
                pair.contender,
                *(number(pair.before_ms), number(pair.ms), f"{pair.ratio:.2f}"),
            )
            for pair in slower
        ]
        print_table(Table("slower than before", header, lines), console)
    say(f"{len(slower)} of {compared} measurements are slower", console)


def _table(title: str, cases: Cases, cell: _Cell) -> Table | None:
    """Return a table of the cases and contenders that have a cell; None if there are none."""
    told = {case: {name: cell(row, rows) for name, row in rows.items()} for case, rows in cases.items()}
    contenders = ordered(name for texts in told.values() for name, text in texts.items() if text)
    if not contenders:
        return None

    def column(name: str) -> Column:
        return Column(name, lambda case, rows: told[case].get(name, ""))

    shown = {case: rows for case, rows in cases.items() if any(told[case].values())}
    return table_of_cases(
        title, [columns.KERNEL, columns.BATCH, columns.LENGTH, *map(column, contenders)], shown, keys=3
    )


def _time_cell(row: Row, rows: Rows) -> str:
    ms, plain = row["ms"], fastest(rows, SDPA)
    time = number(ms)
    if is_ours(row["contender"]) and plain:
        time += f" {ms / plain['ms']:.2f}x"
    rate = number(row["gbps"] if row["pass"] == "decode" else row["tflops"])
    if "fraction" in row:
        rate += f" {row['fraction']:5.0%}"
    spread = (row["high_ms"] - row["low_ms"]) / ms
    return "\n".join([time, rate] + [f"spread {spread:.0%}"] * (spread > NOTABLE_SPREAD))


def _extra_cell(key: str, row: Row, rows: Rows) -> str:
    return "" if row.get(key) is None else number(row[key])
