"""A run as a picture: times, ratios and memory over lengths and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, explain
from .names import STYLES, is_ours, name_kernel, ordered
from .runs import (
    Cases,
    Run,
    groups,
    measurements,
    predicted,
    smallest_batches,
    source,
    typical_kernel,
    typical_length,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg")
_COLUMNS = 3


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


def check_path(path: Path) -> None:
    """Whether :func:`plot_run` can write this file: to be called before a long run.

    Raises:
        InputError: matplotlib is not installed; the suffix is another format's.
    """
    if find_spec("matplotlib") is None:
        rule = "needs matplotlib, which is not installed"
        raise InputError(explain("plot", str(path), rule, "pip install 'mtagen[bench]'"))
    if path.suffix not in _SUFFIXES:
        raise InputError(explain("plot", str(path), "has the suffix of another format", ", ".join(_SUFFIXES)))


def plot_run(run: Run, path: Path) -> None:
    """Draw a run: time and memory over N, ratios to cuDNN by kernel, what windows, packed documents and dropout cost by
    kernel; for decode, GB/s over the length of the cache.

    Panels over lengths show one kernel, (6, 11) where the run has it, at the smallest batch of each length; all show
    causal cases where there are some. What has one length or kernel only is left to the tables, unless all has.

    Raises:
        InputError: as :func:`check_path`, or the run holds no measurement.
    """
    check_path(path)
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
    names = ordered(handles)
    figure.legend(
        [handles[name] for name in names], names, loc="outside upper center", ncols=min(5, len(names)), frameon=False
    )
    figure.supxlabel(source(run), fontsize=7)
    figure.savefig(path, dpi=110)


def _draw(panel: _Panel, ax: Axes) -> None:
    by_length = all(isinstance(x, int) for x in panel.places)
    for name, points in panel.lines.items():
        style = {"markersize": 4, "linewidth": 1.2} | STYLES.get(name, {"color": "0.5", "marker": "."})
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
        names = dict.fromkeys(name for points in panel.lines.values() for name in points)
        ax.set_xticks(range(len(names)), [name.replace(" | ", "\n| ") for name in names])
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
    training = {case: rows for case, rows in cases.items() if not case.decodes and case.base == case}
    data = {case: rows for case, rows in cases.items() if not case.decodes and case.base != case}
    decode = {case: rows for case, rows in cases.items() if case.decodes}
    if training:
        causal = any(case.causal for case in training)
        training = {case: rows for case, rows in training.items() if case.causal == causal}
        kernel, length = typical_kernel(training), typical_length(training)
        lengthwise = {case: rows for case, rows in training.items() if name_kernel(case) == kernel}
        kernelwise = {case: rows for case, rows in training.items() if case.sizes.nk == length}
        yield _panels(lengthwise, partial(_over_lengths, label="ms", key="ms", log=True))
        steps = {case: rows for case, rows in lengthwise.items() if case.pass_name == "forward+backward"}
        yield _panels(steps, partial(_over_lengths, label="peak MiB", key="peak_MiB", log=True))
        yield _panels(kernelwise, _over_kernels)
    if data:
        yield _panels(data, partial(_over_base, measured=cases))
    if decode:
        kernel = typical_kernel(decode)
        lengthwise = {case: rows for case, rows in decode.items() if name_kernel(case) == kernel}
        yield _panels(lengthwise, partial(_over_lengths, label="GB/s", key="gbps"))


def _panels(cases: Cases, panel: Callable[[str, Cases], _Panel]) -> list[_Panel]:
    """A panel for each group, without those that would be empty."""
    return [made for group, part in groups(cases).items() if (made := panel(group, part)).lines]


def _over_lengths(group: str, cases: Cases, *, label: str, key: str, log: bool = False) -> _Panel:
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            if row.get(key) is not None:
                lines.setdefault(name, {})[case.sizes.nk] = row[key]
    ordered = {name: dict(sorted(points.items())) for name, points in lines.items()}
    return _Panel(f"{name_kernel(next(iter(cases)))}: {group}", label, ordered, log)


def _over_kernels(group: str, cases: Cases) -> _Panel:
    peer = "sdpa cudnn" if any("sdpa cudnn" in rows for rows in cases.values()) else "sdpa"
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            if peer in rows and is_ours(name):
                lines.setdefault(name, {})[name_kernel(case)] = row["ms"] / rows[peer]["ms"]
    return _Panel(f"N = {next(iter(cases)).sizes.nk}: {group}", f"time / {peer}", lines)


def _over_base(group: str, cases: Cases, *, measured: Cases) -> _Panel:
    """Over kernels, what windows and dropout cost, and what packed documents take beside a call for each."""
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            peer = rows.get(f"{name} one by one") if case.spec.packed else predicted(case, name, measured)
            if peer:
                lines.setdefault(name, {})[name_kernel(case)] = row["ms"] / peer["ms"]
    packed = any(case.spec.packed for case in cases)
    return _Panel(group, "time / one by one" if packed else "time / predicted", lines)
