"""Time another checkout of mtagen and this one by turns: ``python benchmarks/alternate.py --help``.

GPUs of one kind, and one GPU as it warms up, differ by more than many changes do, so that runs of two days say nothing
of 2 %. Here each round measures both, one after the other, and the least of a case's medians counts.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from mtagen.bench.compare import pairs, slower
from mtagen.bench.report import print_comparison
from mtagen.bench.runs import Run, load

HERE = Path(__file__).resolve().parents[1]


def bench(checkout: Path, options: Sequence[str]) -> Run:
    """A run of a checkout's ``mtagen bench``.

    Raises:
        typer.Exit: it failed; what it said is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-m", "mtagen", "bench", *options, "--json", str(out)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)  # finds its own mtagen first
        if done.returncode:
            typer.echo(f"{checkout}: {shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}", err=True)
            raise typer.Exit(2)
        return load(out)


def least(rounds: Sequence[Run]) -> Run:
    """The first run, with the least time that any had for each case and contender."""
    rows = []
    for same in zip(*(run["results"] for run in rounds), strict=True):
        times = [row["ms"] for row in same if "ms" in row]
        rows.append(same[0] | ({"ms": min(times)} if "ms" in same[0] else {}))
    return rounds[0] | {"results": rows}


def main(
    before: Annotated[Path, typer.Argument(help="The root of the other checkout.", exists=True, file_okay=False)],
    options: Annotated[list[str] | None, typer.Argument(help="Of mtagen bench, after --.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="In which both are measured.")] = 2,
    threshold: Annotated[float, typer.Option(min=0, help="What may be lost, as a share of the time before.")] = 0.02,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write both here.", dir_okay=False)] = None,
) -> None:
    """List what became slower than in another checkout; exit 1 if anything did, 2 if a run failed."""
    sides: dict[Path, list[Run]] = {before: [], HERE: []}
    for checkout in track([*sides] * rounds, "runs", console=Console(stderr=True)):
        sides[checkout].append(bench(checkout, options or []))
    then, now = map(least, sides.values())
    if json_path:
        json_path.write_text(json.dumps({"before": then, "now": now}, indent=1) + "\n", encoding="utf-8")
    found = pairs(now, then)
    lost = slower(found, threshold)
    print_comparison(lost, len(found))
    raise typer.Exit(1 if lost else 0)


if __name__ == "__main__":
    typer.run(main)
