"""Write the tables, figures and plots of pages from measurements.

The measurements are in ``benchmarks/results`` and ``examples/gpt/results``.

python benchmarks/render.py            (needs matplotlib: pip install -e '.[bench]')
python benchmarks/render.py --check    exits 1 if a page or a picture on it is out of date
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from mtagen.bench import summary
from mtagen.bench.columns import NOTHING
from mtagen.bench.names import OURS, PEERS, SAME_MATH, SDPA
from mtagen.bench.plots import (
    Picture,
    picture_of_cases,
    picture_of_layers,
    picture_of_training_steps,
    plot_run,
    shown_in,
)
from mtagen.bench.runs import Run, by_device, device, load_folder, machine, suite_of, union
from mtagen.bench.summary import AUTHORS, PREDICTED, Goal, Part, runs_table, written
from mtagen.bench.tables import Table, to_markdown

Report = dict[str, Any]  # what examples/gpt/throughput.py writes for a model, or one result in it

ROOT = Path(__file__).parent.parent
NOTHING_MEASURED = "Nothing was measured."
ATTENTIONS = {"plain": "plain", "mta": "mtagen", "authors": "authors"}  # name in the reports of models: name on pages
PICTURES = {  # file on pages: suite that it shows, function that draws it
    "training_steps.svg": ("full", picture_of_training_steps),
    "layers.svg": ("layers", picture_of_layers),
    "passes.svg": ("full", picture_of_cases),
}
MAX_CPU_US = 60  # goal for the CPU time of a forward call
RESULTS_HEAD = f"""\
# Results

`mtagen bench` measured these figures. [`render.py`](render.py) writes this page from the runs in
[`results/`](results). Each table takes a case, with all of its contenders, from one run; "{NOTHING}" is not
measured.\
"""

MIXING: dict[str, Any] = {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16}
EVERYTHING: dict[str, Any] = {**MIXING, "kernel": (6, 11), "post_kernel": (6, 11)}
PAIRS: dict[str, Any] = {"post_mixed_heads": 2}
GOALS = (
    Goal("mtagen cuda", "forward", 128, 1.9),
    Goal("mtagen cuda", "forward", 64, 2.2),
    Goal("mtagen cuda", "forward", 128, 2.3, batch=4),
    Goal("mtagen cuda", "forward", 128, 2.4, causal=False),
    Goal("mtagen cuda", "forward", 64, 2.7, causal=False),
    Goal("mtagen cuda", "backward", 128, 2.6),
    Goal("mtagen cuda", "backward", 64, 3.0),
    Goal("mtagen cuda", "backward", 128, 2.7, batch=4, n=4096),
    *(Goal("mtagen cuda sm_80", "forward", d, 3.1) for d in (128, 64)),
    *(Goal("mtagen cuda sm_80", "backward", d, 5.0) for d in (128, 64)),
    Goal("mtagen triton", "forward", 128, 6.0),
    Goal("mtagen triton", "forward", 64, 4.0),
    Goal("mtagen triton", "backward", 128, 15.0),
    Goal("mtagen triton", "backward", 64, 9.0),
    *(
        Goal("mtagen triton", step, d, 1.25, kernel=(1, 1), peer="sdpa flash")
        for step in ("forward", "backward")
        for d in (128, 64)
    ),
    *(
        Goal(contender, "decode", d, limit, batch, n, peer="sdpa flash")
        for contender, limit in (("mtagen cuda", 1.1), ("mtagen triton", 1.3))
        for batch, n in ((8, 32768), (1, 131072))
        for d in (128, 64)
    ),
    # Pipelines: 16 heads mixed before and after the softmax, the same with convolutions, and (6, 11) with pairs after.
    Goal("mtagen cuda", "forward", 128, 3.6, **MIXING),
    Goal("mtagen cuda", "forward", 64, 4.8, **MIXING),
    Goal("mtagen cuda", "backward", 128, 3.8, **MIXING),
    Goal("mtagen cuda", "backward", 64, 5.0, **MIXING),
    Goal("mtagen cuda", "forward+backward", 64, 1 / 4, 4, 2048, peer="authors compiled", **MIXING),
    Goal("mtagen cuda", "forward+backward", 64, 1 / 18, 4, 2048, peer="authors", **MIXING),
    Goal("mtagen cuda", "forward", 128, 9.0, **EVERYTHING),
    Goal("mtagen cuda", "forward", 64, 13.0, **EVERYTHING),
    Goal("mtagen cuda", "forward+backward", 128, 1 / 40, peer="authors", **EVERYTHING),
    Goal("mtagen cuda", "forward+backward", 64, 1 / 15, 4, 2048, peer="authors compiled", **EVERYTHING),
    Goal("mtagen cuda", "forward+backward", 64, 1 / 15, 4, 2048, peer="authors", **EVERYTHING),
    Goal("mtagen cuda", "forward+backward", 128, 4.5, post_mixed_heads=2),
    Goal("mtagen cuda", "decode", 128, 1.5, 8, 32768, peer="sdpa flash", **EVERYTHING),
)
DATA_GOALS = (
    Goal("mtagen cuda", "forward+backward", 128, 1.8, n=32768, peer=PREDICTED, window=(1024, -1)),
    *(
        Goal("mtagen cuda", step, 128, limit, batch=16, peer=f"mtagen cuda {form}", packed=True, **stages)
        for stages in ({}, {"kernel": None}, MIXING, EVERYTHING, PAIRS)
        for form, limit in (("one by one", 1.15), ("padded", 1.0))
        for step in ("forward", "forward+backward")
    ),
    Goal("mtagen cuda", "forward", 128, 1.2, peer=PREDICTED, dropout=True),
    Goal("mtagen cuda", "backward", 128, 1.15, peer=PREDICTED, dropout=True),
    *(
        Goal(f"mtagen triton {target}", step, d, 2.0, peer="mtagen triton")
        for target in ("sm_80", "sm_89")
        for step in ("forward", "backward")
        for d in (128, 64)
    ),
)

TOGETHER = (*OURS, *SAME_MATH, *SDPA)  # so the first figures of the paper's filter come from one run
FIGURES = (
    Part(summary.figures_head),
    Part(summary.speedup_figure, names=TOGETHER),
    Part(summary.plain_figure, names=TOGETHER),
    Part(summary.memory_figure, "peak_MiB", TOGETHER),
)
MEMORY = Part(summary.memory_table, "peak_MiB", suite="memory")
DECODE = Part(summary.decode_table, names=(*OURS, *SDPA))
HEADLINES = (
    Part(summary.paper_table, names=TOGETHER),
    Part(summary.peers_table, names=PEERS),
    Part(summary.slow_cases, names=SAME_MATH),
    Part(summary.layers_table, names=TOGETHER, suite="layers"),
)
PARTS = (
    *HEADLINES,
    Part(summary.kernels_table, names=(*OURS, *SDPA)),
    Part(summary.lengths_table, names=(*OURS, *SDPA)),
    MEMORY,
    DECODE,
    Part(partial(summary.overhead_table, max_cpu_us=MAX_CPU_US), "cpu_us", OURS),
    Part(partial(summary.goals_table, goals=GOALS), names=(*TOGETHER, "mtagen cuda sm_80")),
    Part(summary.data_table, suite="data"),
    Part(summary.scores_table, suite="scores"),
    Part(partial(summary.goals_table, goals=DATA_GOALS), suite="data"),
)


def figures(runs: dict[Path, Run]) -> str:
    """Return the README's three figures, of the first device with training steps."""
    for where, by_path in by_device(runs).items():
        if told := written(by_path.values(), FIGURES):
            head, *lines = told
            return f"On one {where}, {head}:\n\n" + "\n".join(lines)
    return NOTHING_MEASURED


def headlines(runs: dict[Path, Run]) -> str:
    """Return the main tables of each device."""
    blocks = []
    for where, by_path in by_device(runs).items():
        blocks += [f"### {where}", *written(by_path.values(), (*HEADLINES, MEMORY, DECODE))]
    return "\n\n".join(blocks) or NOTHING_MEASURED


def pictures(runs: dict[Path, Run]) -> dict[str, Picture]:
    """Return the pictures on pages by file name, of the first device if it has runs of their suite.

    The contenders of a picture may come from several runs. The contenders of the first figures
    come from one run if a run has them all, as in tables.
    """
    made = {}
    for where, by_path in list(by_device(runs).items())[:1]:
        for name, (suite, picture) in PICTURES.items():
            if chosen := [run for run in by_path.values() if suite_of(run) == suite]:
                caption = f"{where}; runs {', '.join(run['name'] for run in chosen)}"
                made[name] = picture(union(chosen, TOGETHER), caption)
    return made


def load_reports(folder: Path) -> list[Report]:
    """Load the files that ``examples/gpt/throughput.py --json`` wrote, small models first.

    Files of one model and machine, on the same batch and with the same versions, become one report.
    """
    joined: dict[str, Report] = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        same = {name: value for name, value in report.items() if name != "results"}
        first = joined.setdefault(json.dumps(same), same | {"results": []})
        first["results"] += report["results"]
    return sorted(joined.values(), key=lambda report: max(one.get("parameters", 0) for one in report["results"]))


def training_steps(reports: Sequence[Report]) -> str:
    """Return the section on whole models, or nothing if none was measured.

    Each attention is eager or compiled, whichever is faster.
    """
    steps = [(report, best) for report in reports for name in ATTENTIONS if (best := fastest_step(report, name))]
    if not steps:
        return ""
    title = "A training step of [whole models](../examples/gpt/README.md#throughput-of-a-training-step) on one "
    title += f"{device(reports[0])}, each attention eager or compiled, whichever is faster; {AUTHORS}"
    return f"### Training step\n\n{steps_table(title, steps)}"


def throughput(reports: Sequence[Report]) -> str:
    """Return the table of all measurements of whole models, failed ones too."""
    if not reports:
        return NOTHING_MEASURED
    machines = "; ".join(dict.fromkeys(map(machine, reports)))
    steps = [(report, result) for report in reports for result in report["results"]]
    return steps_table(f"{machines}; {AUTHORS}", steps)


def steps_table(title: str, steps: Iterable[tuple[Report, Report]]) -> str:
    """Return a table with a row for each result.

    Speeds are relative to plain attention and to the authors' order, each at its faster form.
    """
    lines = []
    for report, result in steps:
        name, _, compiled = result["contender"].partition("-")
        line = [f"{report['size']}, {report['batch']} x {report['length']}", f"{ATTENTIONS[name]} {compiled}".rstrip()]
        if "error" in result:
            lines.append([*line, result["error"], *[NOTHING] * 4])
            continue
        over = [
            f"{result['tokens_per_s'] / peer['tokens_per_s']:.2f}" if peer else NOTHING
            for peer in (fastest_step(report, "plain"), fastest_step(report, "authors"))
        ]
        peak = NOTHING if result["peak_gib"] is None else f"{result['peak_gib']:.1f}"
        lines.append([*line, f"{result['ms']:.0f}", f"{result['tokens_per_s']:,.0f}", *over, peak])
    header = ["model, tokens", "attention", "ms", "tokens/s", "x plain attention's", "x the authors'", "peak GiB"]
    return to_markdown(Table(title, header, lines)).rstrip()


def fastest_step(report: Report, name: str) -> Report | None:
    """Return the faster result of one attention, or None if no form succeeded."""
    found = [result for result in report["results"] if result["contender"].partition("-")[0] == name and "ms" in result]
    return min(found, key=lambda result: result["ms"], default=None)


def results_page(runs: dict[Path, Run], page: Path) -> str:
    """Return RESULTS.md: all tables of all devices, plots, and the environments of the runs.

    Each suite's run with the most results gets a plot.
    """
    blocks = [RESULTS_HEAD]
    for name, by_path in by_device(runs).items():
        fullest: dict[str, Path] = {}
        for path, run in sorted(by_path.items(), key=lambda item: len(item[1]["results"])):
            fullest[suite_of(run)] = path
        blocks += [f"## {name}", *written(by_path.values(), PARTS)]
        blocks += [*plots(sorted(fullest.values()), page), runs_table(by_path, partial(relative, page=page))]
    return "\n\n".join(blocks) + "\n"


def plots(paths: Iterable[Path], page: Path) -> list[str]:
    return [f"![{path.stem}]({relative(path.with_suffix('.png'), page)})" for path in paths]


def relative(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def wrapped(text: str) -> str:
    """Break long lines at 100 columns, except tables and headings; keep ``a = b`` on one line."""
    lines = [
        line
        if line.startswith(("|", "#"))
        else fill(line.replace(" = ", "\0=\0"), 100, subsequent_indent="  " if line.startswith("- ") else "")
        for line in text.splitlines()
    ]
    return "\n".join(lines).replace("\0", " ")


def filled(text: str, parts: Mapping[str, str], page: Path) -> str:
    """Return the text of a page with the parts between its marks replaced.

    Raises:
        SystemExit: The page lacks a mark. The message names it.
    """
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise SystemExit(f"{page} has no part between {begin} and {end}; add these two lines")
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}" if part else f"{before}{begin}\n{end}{after}"
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="root folder of the repository")
    args = parser.parse_args(arguments)
    runs = load_folder(args.root / "benchmarks/results")
    reports = load_reports(args.root / "examples/gpt/results")
    parts = {
        "README.md": {"figures": wrapped(figures(runs))},
        "docs/performance.md": {
            "training-step": wrapped(training_steps(reports)),
            "speed": wrapped(headlines(runs)),
        },
        "examples/gpt/README.md": {"throughput": throughput(reports)},
    }
    page = args.root / "benchmarks/RESULTS.md"
    pages = {page: results_page(runs, page)}
    for name, part in parts.items():
        path = args.root / name
        pages[path] = filled(path.read_text(encoding="utf-8"), part, path)
    drawn = {args.root / "docs/pictures" / name: picture for name, picture in pictures(runs).items()}
    if args.check:
        stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        stale += [path for path, picture in drawn.items() if not path.is_file() or shown_in(path) != picture.shown]
        for path in stale:
            print(f"{path} is not what was measured: run python benchmarks/render.py", file=sys.stderr)
        return int(bool(stale))
    for path, run in runs.items():
        plot_run(run, path.with_suffix(".png"))
    for path, picture in drawn.items():
        path.parent.mkdir(exist_ok=True)
        picture.save(path)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
