"""Plots of the error of each run over its steps, as a picture or as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from mtagen.bench.plots import check_path
from mtagen.errors import InputError, explain

from ..runs import LOG, Log
from .train import describe


def plot(logs: Sequence[Path], path: Path) -> None:
    """Draw the errors of runs over their steps. Models differ in colour, and runs of one model in line style.

    Args:
        logs: the logs of the runs.
        path: the file to write.

    Raises:
        InputError: a file is absent, is no log, is damaged, or holds no evaluation; or the picture's format is not
            known; or matplotlib is not installed.
    """
    check_path(path)
    from matplotlib.figure import Figure  # of the extra `bench`

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    ax = figure.subplots()
    seeds: dict[str, list[int]] = {}
    for log in logs:
        name, seed, points = _read(log)
        runs = seeds.setdefault(name, [])
        style = ("-", "--", ":", "-.")[len(runs) % 4]
        ax.plot(*zip(*points, strict=True), style, color=f"C{[*seeds].index(name)}", linewidth=1.4)
        runs.append(seed)
    for i, (name, runs) in enumerate(seeds.items()):
        label = f"{name}, seed{'s' * (len(runs) > 1)} {', '.join(map(str, runs))}"
        ax.plot([], [], color=f"C{i}", linewidth=1.4, label=label)
    ax.set_xlabel("steps")
    ax.set_ylabel("test error, %")
    ax.set_ylim(0, 101)
    ax.set_xlim(left=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=110)


def sketch(logs: Sequence[Path], width: int = 60, height: int = 11) -> str:
    """Return the curves of :func:`plot` as text for a terminal, with one character for each model.

    Args:
        logs: the logs of the runs, each run of another model.
        width: number of columns of the curves.
        height: number of lines of the curves, from 100 % on top to 0 %.

    Raises:
        InputError: a file is absent, is no log, is damaged, or holds no evaluation.
    """
    runs = [_read(log) for log in logs]
    last = max(points[-1][0] for _, _, points in runs)
    lines = [[" "] * width for _ in range(height)]
    for mark, (_, _, points) in zip("o*+x", runs, strict=False):
        for column in range(width):
            step = last * (column + 1) / width
            for (before, error), (after, next_error) in pairwise(points):
                if before <= step <= after:
                    between = error + (next_error - error) * (step - before) / (after - before)
                    lines[round((1 - between / 100) * (height - 1))][column] = mark
    labels = [f"{100 * (height - 1 - line) / (height - 1):4.0f} % |" for line in range(height)]
    drawn = [label + "".join(line).rstrip() for label, line in zip(labels, lines, strict=True)]
    steps = f"{last:,} steps"
    named = "   ".join(f"{mark} {name}" for mark, (name, _, _) in zip("o*+x", runs, strict=False))
    return "\n".join(["blocks not found", *drawn, " " * 7 + "-" * width, f"{steps:>{width + 7}}", named])


def _read(log: Path) -> tuple[str, int, list[tuple[int, float]]]:
    """Return the name of the model, the seed, and pairs of steps and error in percent."""
    header, *entries = Log(log, "steps").entries() or [{}]
    if "settings" not in header or not entries or any("error" not in entry for entry in entries):
        raise InputError(
            explain(
                "log", str(log), "holds no evaluation of a run", f"a {LOG} that train wrote, after its first evaluation"
            )
        )
    settings = header["settings"]
    return describe(settings["kernel"]), settings["seed"], [(entry["steps"], 100 * entry["error"]) for entry in entries]
