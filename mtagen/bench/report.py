"""What is made of benchmark runs: tables, plots, and the comparison of one run with another.

A run is the dict that ``mtagen bench --json`` writes: ``command``, ``environment``, ``commit``, ``rates`` and
``results``, one row for each case and contender that holds either a measurement or the reason why it was skipped.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..errors import InputError, explain
from .cases import PAPER, Case

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Run = dict[str, Any]
Row = dict[str, Any]

OURS = "mtagen "  # how the names of mtagen's contenders begin
SDPA = "sdpa"  # and those of plain attention
_OF_CPU = ("mtagen torch", "sdpa")
NOTABLE_SPREAD = 0.05  # of the median, between the quantiles
THRESHOLD = 0.07  # two runs of the same code differ by less
LENGTH = 8192  # of the tables and panels that show one

_RUN_KEYS = ("command", "environment", "commit", "rates", "results")
_CASE_KEYS = ("kernel", "head_dim", "causal", "dtype", "batch", "heads", "kv_heads", "nq", "nk", "pass")
_EXTRA = {"peak_MiB": "peak MiB", "cpu_us": "CPU time of a call, us", "graph_ms": "in a CUDA graph, ms"}
_PLOT_SUFFIXES = (".png", ".svg")
_TIME_KEYS = ("ms", "low_ms", "high_ms")
_PAPER_WIDTH = 120  # columns, where the output is no terminal
_VERSIONS = {"torch": "torch", "triton": "triton", "nvrtc": "NVRTC", "cuda_driver": "driver"}

Cases = dict[Case, dict[str, Row]]  # measurements by contender


def case_of(row: Row) -> Case:
    """The case of a row: what :meth:`.cases.Case.to_dict` made of it."""
    kernel, *rest = (row[key] for key in _CASE_KEYS)
    return Case(tuple(kernel), *rest)


def name_kernel(case: Case) -> str:
    """``cq,ck``, as on the command line."""
    return "{},{}".format(*case.kernel)


def name_size(case: Case) -> str:
    """What tells a case from the others of its group."""
    return f"{name_kernel(case)} B={case.batch} N={case.nk}"


def name_group(case: Case) -> str:
    """What a table of cases has in common."""
    tokens = f"{case.nq} new token{'s' * (case.nq > 1)}"
    which = tokens if case.decodes else "causal" if case.causal else "not causal"
    heads = f"{case.heads} heads" + (f", {case.kv_heads} of keys" if case.kv_heads != case.heads else "")
    return f"{case.pass_name}, {which}, d = {case.head_dim}, {heads}, {case.dtype}"


def load(path: Path) -> Run:
    """Read a run.

    Raises:
        InputError: the file is not a run; the message names what it lacks.
        OSError: it cannot be read.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _no_run(path, f"{error}") from None
    if missing := _missing(run, _RUN_KEYS):
        raise _no_run(path, missing)
    if missing := _missing(run["environment"], ("cpu", "gpus")):
        raise _no_run(path, f"{missing} in 'environment'")
    if not isinstance(run["results"], list):
        raise _no_run(path, "'results' is no list")
    for index, row in enumerate(run["results"]):
        if missing := _missing(row, (*_CASE_KEYS, "contender")):
            raise _no_run(path, f"{missing} in results[{index}]")
        rate = "gbps" if row["pass"] == "decode" else "tflops"
        if "skipped" not in row and (missing := _missing(row, (*_TIME_KEYS, rate))):
            raise _no_run(path, f"neither 'skipped' nor a measurement ({missing}) in results[{index}]")
        if not _is_case(row) or not all(_is_time(row[key]) for key in _TIME_KEYS if key in row):
            raise _no_run(path, f"a value of a wrong type in results[{index}]")
    return dict(run)


def _missing(found: object, keys: Iterable[str]) -> str | None:
    if not isinstance(found, dict):
        return "an object is expected"
    absent = [key for key in keys if key not in found]
    return f"no {', '.join(map(repr, absent))}" if absent else None


def _is_case(row: Row) -> bool:
    sizes = [row[key] for key in ("head_dim", "batch", "heads", "kv_heads", "nq", "nk")]
    kernel = row["kernel"]
    return (
        isinstance(kernel, list)
        and len(kernel) == 2
        and all(type(size) is int and size > 0 for size in (*kernel, *sizes))
        and isinstance(row["causal"], bool)
        and all(isinstance(row[key], str) for key in ("dtype", "pass", "contender"))
    )


def _is_time(ms: object) -> bool:
    return isinstance(ms, (int, float)) and 0 < ms < math.inf


def _no_run(path: Path, fault: str) -> InputError:
    return InputError(explain("run", str(path), f"is no benchmark run: {fault}", "a file of mtagen bench --json"))


def measurements(run: Run) -> Cases:
    """All cases of a run in its order, each with what was measured; empty where every contender was skipped."""
    cases: Cases = {}
    for row in run["results"]:
        rows = cases.setdefault(case_of(row), {})
        if "ms" in row:
            rows[row["contender"]] = row
    return cases


def skipped(rows: Iterable[Row]) -> list[str]:
    """One line for each contender and reason among rows, with the cases where these are not all of its own."""
    rows = list(rows)
    totals = Counter(row["contender"] for row in rows)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "skipped" in row:
            reasons.setdefault((row["contender"], row["skipped"]), []).append(name_size(case_of(row)))
    return [
        f"{name}: {reason}"
        + ("" if len(sizes) == totals[name] else f" ({len(sizes)} of {totals[name]} cases: {_abridged(sizes)})")
        for (name, reason), sizes in reasons.items()
    ]


def _abridged(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names if len(names) <= 3 else (names[0], f"{len(names) - 2} more", names[-1]))


def on_cpu(run: Run) -> bool:
    """Whether a run is of the CPU: there is no GPU, or contenders ran that only the CPU has."""
    return not run["environment"]["gpus"] or any(row["contender"] in _OF_CPU for row in run["results"])


def device(run: Run) -> str:
    """Name of the GPU or CPU."""
    environment = run["environment"]
    return str(environment["cpu"] if on_cpu(run) else environment["gpus"][0]["name"])


def suite(run: Run) -> str:
    """The suite that a run is of, maybe a part of it."""
    found = re.search(r"--suite[= ](\w+)", run["command"])
    return found.group(1) if found else ""


def source(run: Run) -> str:
    """Where figures come from: device, versions, driver, commit, and whether the run is incomplete."""
    environment = run["environment"]
    versions = [f"{name} {environment[key]}" for key, name in _VERSIONS.items() if environment.get(key)]
    notes = ["interrupted"] if run.get("interrupted") else []
    return ", ".join([device(run), *versions, f"commit {run['commit'] or 'unknown'}", *notes])


def number(x: float) -> str:
    """Three digits, or as many as the integer part has."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def fastest_sdpa(rows: Mapping[str, Row]) -> Row | None:
    """The faster of cuDNN and flash at plain attention; None where neither was measured."""
    return min((row for name, row in rows.items() if name.startswith(SDPA)), key=lambda row: row["ms"], default=None)


def print_table(run: Run, console: Console | None = None) -> None:
    """Print a run: a table of times for each pass, mask and head dim, and one of whatever else was measured.

    What was skipped stands below the table, with the reason.
    """
    console = console or _console()
    say = _say(console)
    say(source(run))
    if rates := run["rates"]:
        say(f"measured rates: {number(rates['tensor_tflops'])} TFLOP/s, {number(rates['dram_gbps'])} GB/s")
    say("in a cell: ms, x of the fastest SDPA; TFLOP/s (decode: GB/s), % of the roofline; spread above 5 %")
    for title, cases in _groups(measurements(run)).items():
        tables = {title: _table(cases, _time_cell)}
        tables |= {f"{name}: {title}": _table(cases, partial(_extra_cell, key)) for key, name in _EXTRA.items()}
        for heading, table in tables.items():
            if table:
                say(f"\n{heading}")
                console.print(table)
    console.print()
    for line in skipped(run["results"]):
        say(f"skipped: {line}")


def _groups(cases: Cases) -> dict[str, Cases]:
    groups: dict[str, Cases] = {}
    for case, rows in cases.items():
        groups.setdefault(name_group(case), {})[case] = rows
    return groups


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PAPER_WIDTH)


def _say(console: Console) -> Callable[[str], None]:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    return say


def _table(cases: Cases, cell: Callable[[Row, Mapping[str, Row]], str]) -> Table | None:
    """A line for each case, a column for each contender that has a cell; None where there are none."""
    cells = {case: {name: cell(row, rows) for name, row in rows.items()} for case, rows in cases.items()}
    contenders = _ordered(name for line in cells.values() for name, text in line.items() if text)
    if not contenders:
        return None
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("kernel", "B", "N"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in contenders:
        table.add_column(_folded(name), justify="right", overflow="fold")
    for case, line in cells.items():
        if any(line.values()):
            table.add_row(
                name_kernel(case), str(case.batch), str(case.nk), *(line.get(name, "") for name in contenders)
            )
    return table


def _ordered(contenders: Iterable[str]) -> list[str]:
    """Each once, ours first; those unknown to this version last."""
    places = {name: place for place, name in enumerate(_STYLES)}
    return sorted(set(contenders), key=lambda name: (places.get(name, len(places)), name))


def _folded(name: str) -> str:
    """A contender's name on short lines."""
    for mark in ".-":
        name = name.replace(mark, f"{mark} ")
    return name.replace(" ", "\n")


def _time_cell(row: Row, rows: Mapping[str, Row]) -> str:
    ms, sdpa = row["ms"], fastest_sdpa(rows)
    time = number(ms)
    if row["contender"].startswith(OURS) and sdpa:
        time += f" {ms / sdpa['ms']:.2f}x"
    rate = number(row["gbps"] if row["pass"] == "decode" else row["tflops"])
    if "fraction" in row:
        rate += f" {row['fraction']:5.0%}"
    spread = (row["high_ms"] - row["low_ms"]) / ms
    return "\n".join([time, rate] + [f"spread {spread:.0%}"] * (spread > NOTABLE_SPREAD))


def _extra_cell(key: str, row: Row, rows: Mapping[str, Row]) -> str:
    return "" if row.get(key) is None else number(row[key])


class Slower(NamedTuple):
    """A measurement that lost time; ``ratio`` is ms / before_ms."""

    case: str
    contender: str
    before_ms: float
    ms: float
    ratio: float


class Pair(NamedTuple):
    """The same case and contender, measured in two runs."""

    case: Case
    contender: str
    before_ms: float
    ms: float


def check_device(here: str, before: Run) -> None:
    """Refuse to compare what is measured ``here`` with a run of another device.

    Raises:
        InputError: it is another device.
    """
    if here != device(before):
        rule = "is another device, and times of different devices do not compare"
        raise InputError(explain("against", device(before), rule, here))


def check_shared(cases: Iterable[Case], names: Collection[str], before: Run) -> None:
    """Refuse to compare a run to be made of ``cases`` by the contenders ``names`` with one that has none of them.

    Raises:
        InputError: nothing of mtagen is in both.
    """
    earlier = measurements(before)
    if not any(name.startswith(OURS) and name in earlier.get(case, {}) for case in cases for name in names):
        raise _nothing_shared(before)


def _nothing_shared(before: Run) -> InputError:
    rule = "has no measurement of mtagen in common with this run"
    return InputError(explain("against", before["command"], rule, "a run with some of the same cases"))


def pairs(run: Run, before: Run) -> list[Pair]:
    """What mtagen's contenders were measured at in both runs.

    Raises:
        InputError: the runs are of different devices or have no measurement of mtagen in common.
    """
    check_device(device(run), before)
    earlier = measurements(before)
    found = [
        Pair(case, name, earlier[case][name]["ms"], row["ms"])
        for case, rows in measurements(run).items()
        for name, row in rows.items()
        if name.startswith(OURS) and name in earlier.get(case, {})
    ]
    if not found:
        raise _nothing_shared(before)
    return found


def compare(run: Run, before: Run, threshold: float = THRESHOLD) -> list[Slower]:
    """Measurements of mtagen that take more than ``1 + threshold`` times what they took before, the worst first.

    Raises:
        InputError: as :func:`pairs`.
    """
    slower = [
        Slower(
            f"{name_group(pair.case)}, {name_size(pair.case)}",
            pair.contender,
            pair.before_ms,
            pair.ms,
            pair.ms / pair.before_ms,
        )
        for pair in pairs(run, before)
        if pair.ms > (1 + threshold) * pair.before_ms
    ]
    return sorted(slower, key=lambda row: -row.ratio)


def print_comparison(slower: list[Slower], compared: int, console: Console | None = None) -> None:
    """Print what :func:`compare` found among ``compared`` = ``len(pairs(run, before))`` measurements."""
    console = console or _console()
    if slower:
        table = Table("case", "contender", "before, ms", "now, ms", "ratio", box=SIMPLE_HEAD)
        for row in slower:
            table.add_row(row.case, row.contender, number(row.before_ms), number(row.ms), f"{row.ratio:.2f}")
        console.print(table)
    _say(console)(f"{len(slower)} of {compared} measurements are slower")


class _Panel(NamedTuple):
    """One small plot: ``lines`` has for each contender its points, over lengths or over names of kernels."""

    title: str
    label: str  # of the y axis
    lines: dict[str, dict[Any, float]]
    log: bool = False

    @property
    def places(self) -> set[Any]:
        """Of the x axis."""
        return {x for points in self.lines.values() for x in points}


_COLUMNS = 3
# In the order of tables and legends. Okabe and Ito's colours, which the colour-blind can tell apart; plain attention,
# the lower bound, is dashed.
_STYLES: dict[str, dict[str, Any]] = {
    "mtagen cuda": {"color": "#0072B2", "marker": "o"},
    "mtagen cuda sm_80": {"color": "#0072B2", "marker": "^"},
    "mtagen cuda deterministic": {"color": "#0072B2", "marker": "x"},
    "mtagen triton": {"color": "#009E73", "marker": "s"},
    "mtagen auto": {"color": "#56B4E9", "marker": "*"},
    "mtagen torch": {"color": "#0072B2", "marker": "o"},
    "eager": {"color": "#000000", "marker": "."},
    "torch.compile": {"color": "#E69F00", "marker": "."},
    "liger (post-softmax)": {"color": "#CC79A7", "marker": "."},
    "sdpa flash": {"color": "#D55E00", "marker": "_", "linestyle": ":"},
    "sdpa cudnn": {"color": "#D55E00", "marker": "_", "linestyle": "--"},
    "sdpa": {"color": "#D55E00", "marker": "_", "linestyle": "--"},
}


def check_plot(path: Path) -> None:
    """Whether :func:`plot` can write this file: to be called before a long run.

    Raises:
        InputError: matplotlib is not installed; the suffix is another format's.
    """
    if find_spec("matplotlib") is None:
        rule = "needs matplotlib, which is not installed"
        raise InputError(explain("plot", str(path), rule, "pip install 'mtagen[bench]'"))
    if path.suffix not in _PLOT_SUFFIXES:
        raise InputError(explain("plot", str(path), "has the suffix of another format", ", ".join(_PLOT_SUFFIXES)))


def plot(run: Run, path: Path) -> None:
    """Draw a run: time and memory over N and ratios to cuDNN by kernel; for decode, GB/s over the length of the cache.

    Panels over lengths show one kernel, (6, 11) where the run has it, at the smallest batch of each length; all show
    causal cases where there are some. What has one length or kernel only is left to the tables, unless all has.

    Raises:
        InputError: as :func:`check_plot`, or the run holds no measurement.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    found = [section for section in _sections(measurements(run)) if section]
    several = [[panel for panel in section if len(panel.places) > 1] for section in found]
    sections = [section for section in several if section] or found
    if not sections:
        raise InputError(explain("run", run["command"], "holds no measurement to plot", "a run with measurements"))
    lines = [section[at : at + _COLUMNS] for section in sections for at in range(0, len(section), _COLUMNS)]
    columns = max(map(len, lines))
    figure = Figure(figsize=(max(4.2 * columns, 6), 3 * len(lines) + 1), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False)
    handles: dict[str, Artist] = {}
    for panels, axes in zip(lines, grid, strict=True):
        for panel, ax in zip(panels, axes, strict=False):
            _draw(panel, ax)
            for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)  # of the first panel, whose markers are joined by lines
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
    names = _ordered(handles)
    figure.legend(
        [handles[name] for name in names], names, loc="outside upper center", ncols=min(5, len(names)), frameon=False
    )
    figure.supxlabel(source(run), fontsize=7)
    figure.savefig(path, dpi=110)


def _draw(panel: _Panel, ax: Axes) -> None:
    by_length = all(isinstance(x, int) for x in panel.places)
    for name, points in panel.lines.items():
        style = {"markersize": 4, "linewidth": 1.2} | _STYLES.get(name, {"color": "0.5", "marker": "."})
        if not by_length:
            style["linestyle"] = "none"
        ax.plot(list(points), list(points.values()), label=name, **style)
    if by_length:
        lengths = sorted(panel.places)
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        ax.minorticks_off()
    else:
        ax.axhline(1, color="0.5", linewidth=0.8)
    if panel.log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.set_title(panel.title, fontsize=8)
    ax.set_xlabel("length" if by_length else "kernel", fontsize=7)
    ax.set_ylabel(panel.label, fontsize=7)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)


def _sections(cases: Cases) -> Iterator[list[_Panel]]:
    """Panels that belong together; each section begins a line of the figure."""
    cases = smallest_batches({case: rows for case, rows in cases.items() if rows})
    training = {case: rows for case, rows in cases.items() if not case.decodes}
    decode = {case: rows for case, rows in cases.items() if case.decodes}
    if training:
        causal = any(case.causal for case in training)
        training = {case: rows for case, rows in training.items() if case.causal == causal}
        kernel, length = typical_kernel(training), typical_length(training)
        lengthwise = {case: rows for case, rows in training.items() if case.kernel == kernel}
        kernelwise = {case: rows for case, rows in training.items() if case.nk == length}
        yield _panels(lengthwise, partial(_over_lengths, label="ms", key="ms", log=True))
        steps = {case: rows for case, rows in lengthwise.items() if case.pass_name == "forward+backward"}
        yield _panels(steps, partial(_over_lengths, label="peak MiB", key="peak_MiB", log=True))
        yield _panels(kernelwise, _over_kernels)
    if decode:
        kernel = typical_kernel(decode)
        lengthwise = {case: rows for case, rows in decode.items() if case.kernel == kernel}
        yield _panels(lengthwise, partial(_over_lengths, label="GB/s", key="gbps"))


def _panels(cases: Cases, panel: Callable[[str, Cases], _Panel]) -> list[_Panel]:
    """A panel for each group, without those that would be empty."""
    return [made for group, part in _groups(cases).items() if (made := panel(group, part)).lines]


def _over_lengths(group: str, cases: Cases, *, label: str, key: str, log: bool = False) -> _Panel:
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            if row.get(key) is not None:
                lines.setdefault(name, {})[case.nk] = row[key]
    ordered = {name: dict(sorted(points.items())) for name, points in lines.items()}
    return _Panel(f"{name_kernel(next(iter(cases)))}: {group}", label, ordered, log)


def _over_kernels(group: str, cases: Cases) -> _Panel:
    peer = "sdpa cudnn" if any("sdpa cudnn" in rows for rows in cases.values()) else "sdpa"
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            if peer in rows and name.startswith(OURS):
                lines.setdefault(name, {})[name_kernel(case)] = row["ms"] / rows[peer]["ms"]
    return _Panel(f"N = {next(iter(cases)).nk}: {group}", f"time / {peer}", lines)


def smallest_batches(cases: Cases) -> Cases:
    """Without the cases that are there with fewer sequences, too."""
    kept: dict[Case, Case] = {}
    for case in sorted(cases, key=lambda case: case.batch):
        kept.setdefault(replace(case, batch=1), case)
    smallest = set(kept.values())
    return {case: rows for case, rows in cases.items() if case in smallest}


def typical_length(cases: Iterable[Case]) -> int:
    """N of the tables and panels that show one: 8192, or the largest there is."""
    lengths = {case.nk for case in cases}
    return LENGTH if LENGTH in lengths else max(lengths)


def typical_kernel(cases: Iterable[Case]) -> tuple[int, int]:
    """The kernel of those that show one: (6, 11), or the first there is."""
    kernels = [case.kernel for case in cases]
    return PAPER if PAPER in kernels else kernels[0]
