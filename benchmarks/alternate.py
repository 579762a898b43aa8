"""Time another checkout of mtagen and this one alternately, on the same GPU.

``python benchmarks/alternate.py --help`` prints the options. GPUs of one kind differ by 3 to 4 %,
and a GPU slows down as it warms up. So runs of different days cannot show a change of 2 %. Here
each round runs both checkouts, and each case counts with its shortest median of all rounds.
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
    """Run a checkout's ``mtagen bench`` and return its results.

    Raises:
        typer.Exit: the run failed. Its last output is printed first.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-m", "mtagen", "bench", *options, "--json", str(out)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)  # imports the mtagen in cwd
        if done.returncode:
            typer.echo(f"{checkout}: {shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}", err=True)
            raise typer.Exit(2)
        return load(out)


def least(rounds: Sequence[Run]) -> Run:
    """Return the first run with the shortest time of all rounds for each case and contender."""
    rows = []
    for same in zip(*(run["results"] for run in rounds), strict=True):
        times = [row["ms"] for row in same if "ms" in row]
        rows.append(same[0] | ({"ms": min(times)} if "ms" in same[0] else {}))
    return rounds[0] | {"results": rows}


def main(
    before: Annotated[Path, typer.Argument(help="Root folder of the other checkout.", exists=True, file_okay=False)],
    options: Annotated[list[str] | None, typer.Argument(help="Options of mtagen bench, after --.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs both checkouts once.")] = 2,
    threshold: Annotated[float, typer.Option(min=0, help="Largest accepted slowdown: 0.02 is 2 %.")] = 0.02,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results of both checkouts to this file.", dir_okay=False)
    ] = None,
) -> None:
    """List the cases that are slower than in another checkout.

    The exit code is 1 if a case is slower, and 2 if a run failed.
    """
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
