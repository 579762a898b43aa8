"""Draw a picture and write tables of runs that :mod:`.compare` trained: ``python -m examples.gpt.plot --help``."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtagen.errors import InputError, explain

from ..runs import LOG, Entry, Log, one_line, publish_bytes, publish_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "comparison"  # file name of the picture and of both tables, without suffix
LABELS = {
    "plain": "plain attention",
    "talking-heads": "talking-heads attention",
    "mta": "multi-token attention",
    "authors": "multi-token attention, authors' order",
}
SETTLED = 0.15  # fraction of the steps; earlier validations do not set the scale of the picture


@dataclass(frozen=True)
class Curve:
    """The validations of a run.

    Attributes:
        log: the file.
        header: the log's first line.
        entries: the log's lines that have a validation, in the order of their steps.
    """

    log: Path
    header: Entry
    entries: list[Entry]

    @property
    def variant(self) -> str:
        """The run's attention."""
        return str(self.header["settings"]["variant"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.header["settings"]["seed"])

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that all runs of a comparison share."""
        return {name: value for name, value in self.header["settings"].items() if name not in ("variant", "seed")}

    def values(self, name: str) -> list[float]:
        """Return one field of all validations."""
        return [entry[name] for entry in self.entries]


def read_curves(folder: Path) -> list[Curve]:
    """Return the validations of all runs of a folder, ordered by attention and seed.

    Args:
        folder: a folder with one folder for each run, or with the logs that :func:`publish_comparison` wrote.

    Raises:
        InputError: the folder has no log with a validation, or runs differ in more than attention and seed.
    """
    curves = []
    for log in sorted([*folder.glob(f"*/{LOG}"), *folder.glob("*.jsonl")]):
        header, *entries = Log(log, "step", writes=False).entries() or [{}]
        validated = [entry for entry in entries if "validation_loss" in entry]
        if "settings" in header and validated:
            curves.append(Curve(log, header, validated))
    if not curves:
        raise InputError(
            explain("folder", str(folder), "has no log with a validation", "a folder that examples.gpt.compare wrote")
        )
    for curve in curves:
        if curve.shared != curves[0].shared:
            rule = f"its settings differ from those of {curves[0].log}"
            raise InputError(explain(str(curve.log), curve.shared, rule, curves[0].shared))
    order = [*LABELS]
    return sorted(curves, key=lambda curve: (order.index(curve.variant), curve.seed))


def by_variant(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return a dict from each attention to its runs."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.variant, []).append(curve)
    return found


def summarize(curves: Sequence[Curve], commit: str | None = None) -> dict[str, Any]:
    """Return the figures of the tables: the last validation of each run, and the mean of each attention's runs.

    Args:
        curves: the runs, from :func:`read_curves`.
        commit: the commit of runs whose logs have none.
    """
    variants = {}
    for variant, runs in by_variant(curves).items():
        finals = {run.seed: _final(run) for run in runs}
        mean = {
            name: statistics.fmean(final[name] for final in finals.values()) for name in next(iter(finals.values()))
        }
        variants[variant] = {"parameters": runs[0].header["parameters"], "seeds": finals, "mean": mean}
    environments = []
    for curve in curves:
        known = curve.header["environment"]
        if (facts := known | {"commit": known["commit"] or commit}) not in environments:
            environments.append(facts)
    return {"settings": curves[0].shared, "environments": environments, "variants": variants}


def _final(run: Curve) -> dict[str, float]:
    last, settings = run.entries[-1], run.header["settings"]
    return {
        "step": last["step"],
        "validation_loss": last["validation_loss"],
        "bits_per_byte": last["bits_per_byte"],
        "seconds": last["seconds"],
        "tokens_per_s": last["step"] * settings["batch"] * settings["length"] / last["seconds"],
    }


def table(summary: dict[str, Any]) -> str:
    """Return a summary as Markdown."""
    lines = [
        "| attention | parameters | seed | steps | nats a token | bits a byte | seconds of training | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in summary["variants"].items():
        rows = {**runs["seeds"], **({"mean": runs["mean"]} if len(runs["seeds"]) > 1 else {})}
        for seed, final in rows.items():
            cells = (
                LABELS[variant],
                f"{runs['parameters']:,}",
                seed,
                f"{final['step']:,.0f}",
                f"{final['validation_loss']:.4f}",
                f"{final['bits_per_byte']:.4f}",
                f"{final['seconds']:,.1f}",
                f"{final['tokens_per_s']:,.0f}",
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    machines = "; ".join(
        f"{facts['device']}, torch {facts['torch']}, triton {facts['triton'] or 'absent'}, "
        f"mtagen {facts['mtagen']}, commit {facts['commit'] or 'unknown'}"
        for facts in summary["environments"]
    )
    return "\n".join([*lines, "", f"{machines}."])


def draw(curves: Sequence[Curve]) -> bytes:
    """Return a PNG of the validation loss over steps and over seconds.

    A thick line is the mean over the seeds of an attention.
    """
    from matplotlib.figure import Figure  # of the extra `bench`

    figure = Figure(figsize=(9.6, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, field in ((left, "step"), (right, "seconds")):
        for number, (variant, runs) in enumerate(by_variant(curves).items()):
            _draw_lines(ax, field, runs, f"C{number}", LABELS[variant])
        ax.set_xlim(left=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    first = SETTLED * max(curve.entries[-1]["step"] for curve in curves)
    settled = [entry["validation_loss"] for curve in curves for entry in curve.entries if entry["step"] >= first]
    margin = 0.04 * (max(settled) - min(settled)) or 0.1
    left.set_ylim(min(settled) - margin, max(settled) + margin)
    left.set_xlabel("steps")
    left.set_ylabel("validation loss, nats a token")
    right.set_xlabel("seconds of training, without validation and compiling")
    left.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _draw_lines(ax: Axes, field: str, runs: Sequence[Curve], color: str, label: str) -> None:
    for run in runs:
        ax.plot(run.values(field), run.values("validation_loss"), color=color, linewidth=0.8, alpha=0.55)
    count = min(len(run.entries) for run in runs)
    means = [
        [statistics.fmean(values) for values in zip(*(run.values(name)[:count] for run in runs), strict=True)]
        for name in (field, "validation_loss")
    ]
    seeds = f"mean of seeds {', '.join(str(run.seed) for run in runs)}" if len(runs) > 1 else f"seed {runs[0].seed}"
    ax.plot(*means, color=color, linewidth=1.8, label=f"{label}, {seeds}")


def publish_comparison(folder: Path, results: Path, commit: str | None = None) -> str:
    """Write a picture, a table, the table's figures as JSON, and copies of the logs. Return the table.

    Args:
        folder: the folder of the runs, or the results of an earlier comparison.
        results: the folder to write to; made if absent.
        commit: the commit of runs whose logs have none.

    Raises:
        InputError: see :func:`read_curves`.
    """
    curves = read_curves(folder)
    results.mkdir(parents=True, exist_ok=True)
    for curve in curves:
        if results.resolve() != folder.resolve():
            publish_bytes(results / f"{curve.variant}-{curve.seed}.jsonl", curve.log.read_bytes())
    summary = summarize(curves, commit)
    publish_json(results / f"{NAME}.json", summary)
    text = table(summary)
    publish_bytes(results / f"{NAME}.md", f"{text}\n".encode())
    if find_spec("matplotlib"):
        publish_bytes(results / f"{NAME}.png", draw(curves))
    else:
        typer.echo("no picture, because matplotlib is absent: pip install 'mtagen[bench]'", err=True)
    return text


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs, or of their logs.", exists=True, file_okay=False)],
    results: Annotated[
        Path | None, typer.Option(help="Folder to write the picture, tables and logs to.", show_default="FOLDER")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to name for runs whose logs have none.")] = None,
) -> None:
    """Draw the validation losses of runs over steps and over time, and write a table of the final losses."""
    with one_line("plot"):
        typer.echo(publish_comparison(folder, results or folder, commit))


if __name__ == "__main__":
    typer.run(main)
