"""Write ``RESULTS.md``, the README's part of it, and a plot beside each run, from the runs in ``benchmarks/results``.

python benchmarks/render.py            (needs matplotlib: pip install -e '.[bench]')
python benchmarks/render.py --check    exits 1 if a page is not what the runs say
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from mtagen.bench import summary
from mtagen.bench.columns import NOTHING
from mtagen.bench.names import OURS, PEERS, SAME_MATH, SDPA
from mtagen.bench.plots import plot_run
from mtagen.bench.runs import Run, by_device, load_folder, suite_of
from mtagen.bench.summary import PREDICTED, Goal, Part, runs_table, written

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
MAX_CPU_US = 60  # of a forward call
RESULTS_HEAD = f"""\
# Results

What `mtagen bench` measured, as [`render.py`](render.py) writes it from the runs in [`results/`](results). Each table
takes a case, with all of its contenders, from one run; "{NOTHING}" is not measured.\
"""

MIXING: dict[str, Any] = {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16}
EVERYTHING: dict[str, Any] = {**MIXING, "kernel": (6, 11), "post_kernel": (6, 11)}
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
    # Pipelines: 16 heads mixed before and after the softmax, the same with convolutions, and the best small model's.
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
        for stages in ({}, {"kernel": None}, MIXING, EVERYTHING)
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

HEADLINES = (  # those in the README
    Part(summary.paper_table, names=(*OURS, *SDPA)),
    Part(summary.peers_table, names=PEERS),
    Part(summary.slow_cases, names=SAME_MATH),
    Part(summary.layers_table, names=(*OURS, *SAME_MATH, *SDPA), suite="layers"),
)
PARTS = (
    *HEADLINES,
    Part(summary.kernels_table, names=(*OURS, *SDPA)),
    Part(summary.lengths_table, names=(*OURS, *SDPA)),
    Part(summary.memory_table, "peak_MiB", suite="memory"),
    Part(summary.decode_table, names=(*OURS, *SDPA)),
    Part(partial(summary.overhead_table, max_cpu_us=MAX_CPU_US), "cpu_us", OURS),
    Part(partial(summary.goals_table, goals=GOALS), names=(*OURS, *SAME_MATH, *SDPA, "mtagen cuda sm_80")),
    Part(summary.data_table, suite="data"),
    Part(partial(summary.goals_table, goals=DATA_GOALS), suite="data"),
)


def headlines(runs: dict[Path, Run], page: Path) -> str:
    """What stands between the README's marks: for each device the main tables, and the plot of its fullest run."""
    blocks = []
    for name, by_path in by_device(runs).items():
        fullest = max(by_path, key=lambda path: len(by_path[path]["results"]))
        blocks += [f"### {name}", *written(by_path.values(), HEADLINES), *plots([fullest], page)]
    return "\n\n".join(blocks) or "Nothing was measured."


def results_page(runs: dict[Path, Run], page: Path) -> str:
    """All tables of all devices, a plot of each suite's fullest run, and what the runs were made with."""
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would change")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder of the runs")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks/RESULTS.md", help="file for all tables")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the marks")
    args = parser.parse_args(arguments)
    runs = load_folder(args.results)
    text = args.readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        parser.error(f"{args.readme} has no part between {BEGIN} and {END}")
    made = {
        args.readme: f"{before}{begin}\n\n{headlines(runs, args.readme)}\n\n{end}{after}",
        args.page: results_page(runs, args.page),
    }
    if args.check:
        stale = [path for path, new in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != new]
        for path in stale:
            print(f"{path} is not what {args.results} holds: run python benchmarks/render.py", file=sys.stderr)
        return int(bool(stale))
    for path, run in runs.items():
        plot_run(run, path.with_suffix(".png"))
    for path, new in made.items():
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
