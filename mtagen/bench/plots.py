"""Pictures of measurements: times, ratios and memory over lengths, kernels and layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, explain
from ..measure.cases import Case, Sizes
from .names import SAME_MATH, SDPA, STYLES, is_ours, name_kernel, ordered
from .runs import (
    Cases,
    Run,
    groups,
    is_a_layer,
    is_the_papers,
    measurements,
    ours_and,
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
_UPRIGHT = 6  # kernels whose names fit below a panel side by side
_IN_WORDS = {  # contenders in the legends of pictures for readers who do not know the tables
    "sdpa cudnn": "plain attention, cuDNN",
    "sdpa flash": "plain attention, flash",
    "sdpa": "plain attention",
    "authors": "authors' order",
    "authors compiled": "authors' order, compiled",
}


class _Panel(NamedTuple):
    """One small plot: ``lines`` has the points of each contender, over lengths or names of kernels."""

    title: str
    label: str  # label of the axis of values
    lines: dict[str, dict[Any, float]]
    log: bool = False

    @property
    def places(self) -> set[Any]:
        """The places on the x axis."""
        return {x for points in self.lines.values() for x in points}


class Picture(NamedTuple):
    """Panels, line by line, with one legend above them.

    Attributes:
        lines: a line of the picture may have fewer panels than others.
        draw: draws a panel.
        caption: text below the picture: the source of the measurements.
        in_words: names of contenders in the legend, where they differ from the usual names.
    """

    lines: Sequence[Sequence[_Panel]]
    draw: Callable[[_Panel, Axes], None]
    caption: str
    in_words: Mapping[str, str] = {}

    @property
    def shown(self) -> str:
        """The picture's content, in JSON."""
        return json.dumps([panel._asdict() for panels in self.lines for panel in panels])

    def save(self, path: Path) -> None:
        """Write it. An SVG holds ``shown``, and is the same file whenever it is made.

        Raises:
            InputError: as :func:`check_path`, or there is no panel.
        """
        check_path(path)
        if not any(self.lines):
            raise InputError(explain("plot", self.caption, "holds no measurement to plot", "runs with measurements"))
        import matplotlib as mpl
        from matplotlib.figure import Figure

        columns = max(map(len, self.lines))
        figure = Figure(figsize=(max(4.2 * columns, 6), 3 * len(self.lines) + 1), layout="constrained")
        grid = figure.subplots(len(self.lines), columns, squeeze=False)
        handles: dict[str, Artist] = {}
        for panels, axes in zip(self.lines, grid, strict=True):
            for panel, ax in zip(panels, axes, strict=False):
                self.draw(panel, ax)
                for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
                    handles.setdefault(name, handle)  # of the first panel, whose markers are joined by lines
            for ax in axes[len(panels) :]:
                ax.set_axis_off()
        names = ordered(handles)
        figure.legend(
            [handles[name] for name in names],
            [self.in_words.get(name, name) for name in names],
            loc="outside upper center",
            ncols=min(5, len(names)),
            frameon=False,
            fontsize=8 if self.in_words else None,
        )
        figure.supxlabel(fill(self.caption, 150), fontsize=7)
        metadata = {"Date": None, "Description": self.shown} if path.suffix == ".svg" else {}
        with mpl.rc_context({"svg.hashsalt": "mtagen"}):
            figure.savefig(path, dpi=110, metadata=metadata)


def shown_in(path: Path) -> str:
    """Return the content of the picture in an SVG, for any version of matplotlib; empty if the file
    lacks it.
    """
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    return unescape(found[1]) if found else ""


def check_path(path: Path) -> None:
    """Check that a picture can be saved as this file, before a long run.

    Raises:
        InputError: matplotlib is not installed; the suffix is another format's.
    """
    if find_spec("matplotlib") is None:
        rule = "needs matplotlib, which is not installed"
        raise InputError(explain("plot", str(path), rule, "pip install 'mtagen[bench]'"))
    if path.suffix not in _SUFFIXES:
        raise InputError(
            explain("plot", str(path), "must end in the suffix of a supported format", ", ".join(_SUFFIXES))
        )


def plot_run(run: Run, path: Path) -> None:
    """Draw :func:`picture_of_cases` of a run.

    Raises:
        InputError: as :func:`check_path`, or the run holds no measurement.
    """
    picture_of_cases(measurements(run), source(run)).save(path)


def picture_of_cases(cases: Cases, caption: str) -> Picture:
    """Time and memory over N, ratios to cuDNN by kernel, what windows, packed documents and dropout cost by kernel; for
    decode, GB/s over the length of the cache. All are of one device.

    Panels over lengths show one kernel, (6, 11) where it was measured, at the smallest batch of
    each length; all show causal cases where there are some. Groups with a single length or kernel
    are only in tables, unless all are.
    """
    found = [section for section in _sections(cases) if section]
    several = [[panel for panel in section if len(panel.places) > 1] for section in found]
    sections = [section for section in several if section] or found
    lines = [section[at : at + _COLUMNS] for section in sections for at in range(0, len(section), _COLUMNS)]
    return Picture(lines, _draw, caption)


def picture_of_training_steps(cases: Cases, caption: str) -> Picture:
    """Time and memory of a training step of the paper's kernel over N, beside PyTorch's and plain attention's.

    It is of the greatest head dim. Short sequences come in large batches: both are divided by the number of sequences.
    """
    return Picture([_training_steps(cases)], _draw_with_gap, caption, _IN_WORDS)


def picture_of_layers(cases: Cases, caption: str) -> Picture:
    """Time of a training step of each of the paper's layers, beside all who compute the same, and plain attention.

    It is of the head dim at which most contenders were measured.
    """
    return Picture([_layers(cases)], _draw_layers, caption, _IN_WORDS)


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
        slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(names) > _UPRIGHT else {}
        ax.set_xticks(range(len(names)), [name.replace(" | ", "\n| ") for name in names], **slanted)
    if panel.log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.set_xlabel("length" if by_length else "kernel", fontsize=7)
    ax.set_ylabel(panel.label, fontsize=7)
    _frame(panel, ax)


def _draw_with_gap(panel: _Panel, ax: Axes) -> None:
    """As :func:`_draw`, and at the greatest length at which PyTorch was measured, how many times as much it takes."""
    _draw(panel, ax)
    ours, peers = panel.lines.get("mtagen", {}), _best_of(panel, SAME_MATH)
    if common := ours.keys() & peers.keys():
        n = max(common)
        ax.plot([n, n], [ours[n], peers[n]], color="0.6", linewidth=1, zorder=0)
        ax.text(1.1 * n, (ours[n] * peers[n]) ** 0.5, f"{peers[n] / ours[n]:.0f}×", va="center", fontsize=8)


def _draw_layers(panel: _Panel, ax: Axes) -> None:
    """Draw a line for each layer with its times, and the time of PyTorch's fastest contender over
    mtagen's.
    """
    names = dict.fromkeys(name for points in panel.lines.values() for name in points)
    places = {name: -at for at, name in enumerate(names)}
    for contender, points in panel.lines.items():
        style = {"markersize": 7} | STYLES[contender] | {"linestyle": "none"}
        ax.plot(list(points.values()), [places[name] for name in points], label=contender, **style)
    for name, theirs in _best_of(panel, SAME_MATH).items():
        ours, y = panel.lines["mtagen"][name], places[name]
        ax.plot([ours, theirs], [y, y], color="0.6", linewidth=1, zorder=0)
        ax.text((ours * theirs) ** 0.5, y + 0.08, f"{theirs / ours:.1f}×", ha="center", fontsize=8)
    ax.set_xscale("log")
    ax.set_yticks(list(places.values()), [name.replace(" | ", "\n| ") for name in places])
    ax.set_ylim(0.5 - len(places), 0.5)
    ax.set_xlabel(panel.label, fontsize=7)
    _frame(panel, ax)


def _frame(panel: _Panel, ax: Axes) -> None:
    """Draw the title and the common parts of all panels."""
    ax.set_title(panel.title, fontsize=8)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)


def _best_of(panel: _Panel, names: Iterable[str]) -> dict[Any, float]:
    """Return the smallest value of some contenders at each place at which one of them was measured."""
    lines = [panel.lines[name] for name in names if name in panel.lines]
    places = dict.fromkeys(x for points in lines for x in points)
    return {x: min(points[x] for points in lines if x in points) for x in places}


def _sections(cases: Cases) -> Iterator[list[_Panel]]:
    """Return sections of panels that belong together; each section begins a line of the figure."""
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


def _training_steps(cases: Cases) -> list[_Panel]:
    """Return panels of the time and memory of a sequence over lengths."""
    steps = _steps(cases, is_the_papers, (*SAME_MATH, *SDPA))
    d = max((case.spec.head_dim for case in steps), default=0)
    steps = smallest_batches({case: rows for case, rows in steps.items() if case.spec.head_dim == d})
    labels = {"ms": "ms / sequence", "peak_MiB": "peak MiB / sequence"}
    return [
        panel
        for key, label in labels.items()
        for panel in _panels(steps, partial(_over_lengths, label=label, key=key, log=True, of_a_sequence=True))
    ]


def _layers(cases: Cases) -> list[_Panel]:
    """Return panels of the time of a step by layer, for each size at which several layers were
    measured.
    """
    steps = _steps(cases, is_a_layer, (*SAME_MATH, "sdpa cudnn", "sdpa"))
    d = max(steps, key=lambda case: len(steps[case])).spec.head_dim if steps else 0
    of_size: dict[Sizes, Cases] = {}
    for case, shown in steps.items():
        if case.spec.head_dim == d:
            of_size.setdefault(case.sizes, {})[case] = shown
    return [_over_layers(size, part) for size, part in of_size.items() if len(part) > 1]


def _steps(cases: Cases, keep: Callable[[Case], bool], peers: Sequence[str]) -> Cases:
    """Return the selected training steps with a measurement of mtagen: its fastest contender, and
    the peers.
    """
    steps = {case: ours_and(rows, peers) for case, rows in cases.items() if case.pass_name == "forward+backward"}
    return {case: rows for case, rows in steps.items() if keep(case) and "mtagen" in rows}


def _panels(cases: Cases, panel: Callable[[str, Cases], _Panel]) -> list[_Panel]:
    """Return a panel for each group, without empty panels."""
    return [made for group, part in groups(cases).items() if (made := panel(group, part)).lines]


def _over_lengths(
    group: str, cases: Cases, *, label: str, key: str, log: bool = False, of_a_sequence: bool = False
) -> _Panel:
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            if row.get(key) is not None:
                lines.setdefault(name, {})[case.sizes.nk] = row[key] / (case.sizes.batch if of_a_sequence else 1)
    ordered = {name: dict(sorted(points.items())) for name, points in lines.items()}
    return _Panel(f"{name_kernel(next(iter(cases)))}: {group}", label, ordered, log)


def _over_layers(sizes: Sizes, cases: Cases) -> _Panel:
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            lines.setdefault(name, {})[name_kernel(case)] = row["ms"]
    spec = next(iter(cases)).spec
    title = f"N = {sizes.nk}, B = {sizes.batch}, d = {spec.head_dim}, {sizes.heads} heads, {spec.dtype}"
    return _Panel(title, "forward+backward, ms", lines, log=True)


def _over_kernels(group: str, cases: Cases) -> _Panel:
    peer = "sdpa cudnn" if any("sdpa cudnn" in rows for rows in cases.values()) else "sdpa"
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            if peer in rows and is_ours(name):
                lines.setdefault(name, {})[name_kernel(case)] = row["ms"] / rows[peer]["ms"]
    return _Panel(f"N = {next(iter(cases)).sizes.nk}: {group}", f"time / {peer}", lines)


def _over_base(group: str, cases: Cases, *, measured: Cases) -> _Panel:
    """Return panels over kernels: the cost of windows and dropout, and packed documents against a
    call for each.
    """
    lines: dict[str, dict[Any, float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items():
            peer = rows.get(f"{name} one by one") if case.spec.packed else predicted(case, name, measured)
            if peer:
                lines.setdefault(name, {})[name_kernel(case)] = row["ms"] / peer["ms"]
    packed = any(case.spec.packed for case in cases)
    return _Panel(group, "time / one by one" if packed else "time / predicted", lines)
