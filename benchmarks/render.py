"""Write ``RESULTS.md``, the README's part of it, and a plot beside each run, from the runs in ``benchmarks/results``.

python benchmarks/render.py            (needs matplotlib: pip install -e '.[bench]')
python benchmarks/render.py --check    exits 1 if a page is not what the runs say
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from mtagen.bench import report
from mtagen.bench.cases import PAPER, TRAINING, Case
from mtagen.bench.report import Row, Run, number

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
BACKENDS = ("mtagen cuda", "mtagen triton", "mtagen torch")
OURS = (*BACKENDS, "mtagen auto")  # without those that are asked for: other targets, deterministic
SAME_MATH = ("eager", "torch.compile")
PEERS = (*SAME_MATH, "liger (post-softmax)")
SDPA = ("sdpa cudnn", "sdpa flash", "sdpa")
NONE = "–"  # not measured
MAX_CPU_US = 60  # of a forward call
RESULTS_HEAD = f"""\
# Results

What `mtagen bench` measured, as [`render.py`](render.py) writes it from the runs in [`results/`](results). Each table
takes a case, with all of its contenders, from one run; "{NONE}" is not measured.\
"""


class Measured(NamedTuple):
    """A case's measurements by contender, all of one run."""

    rows: dict[str, Row]
    run: Run


Results = dict[Case, Measured]  # of one device


class Goal(NamedTuple):
    """A contender's time over a peer's that is not to be exceeded; causal, 16 heads, bf16; decode: one new token."""

    contender: str
    step: str
    head_dim: int
    limit: float
    batch: int = 1
    n: int = report.LENGTH
    causal: bool = True
    kernel: tuple[int, int] = PAPER
    peer: str = "sdpa cudnn"

    @property
    def case(self) -> Case:
        """Where both are timed."""
        rows = 1 if self.step == "decode" else self.n
        return Case(self.kernel, self.head_dim, self.causal, "bf16", self.batch, 16, 16, rows, self.n, self.step)


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
)


def merge(runs: Iterable[Run], key: str = "ms", names: Collection[str] = (), suite: str = "") -> Results:
    """All cases of runs on one device; of a case in several, the run that took ``key`` of most contenders at it.

    Only ``names`` count, if there are any. Runs of ``suite`` go before all others. Ties go to the first.
    """

    def rank(found: Measured) -> tuple[bool, int]:
        count = sum(name in names for name in found.rows) if names else len(found.rows)
        return report.suite(found.run) == suite, count

    results: Results = {}
    for run in runs:
        for case, measured in report.measurements(run).items():
            found = Measured({name: row for name, row in measured.items() if row.get(key) is not None}, run)
            if case not in results or rank(found) > rank(results[case]):
                results[case] = found
    return dict(sorted(results.items(), key=lambda item: place(item[0])))


def place(case: Case) -> tuple[object, ...]:
    """Orders the lines of tables."""
    step = (*TRAINING, "decode").index(case.pass_name)
    return case.head_dim, not case.causal, case.nk, case.batch, case.kernel, -case.kv_heads, case.nq, step


def select(results: Results, keep: Callable[[Case], bool]) -> Results:
    """The cases to keep, of those at which mtagen was measured."""
    return {case: found for case, found in results.items() if keep(case) and best(found.rows)}


def best(rows: dict[str, Row], names: Iterable[str] = OURS) -> Row | None:
    """The fastest of some contenders."""
    return min((rows[name] for name in names if name in rows), key=lambda row: row["ms"], default=None)


def present(results: Results, names: Iterable[str]) -> list[str]:
    """Those of some contenders that were measured at any of the cases."""
    return [name for name in names if any(name in found.rows for found in results.values())]


def figure(row: Row | None, key: str = "ms") -> str:
    return NONE if row is None or row.get(key) is None else number(row[key])


def ratio(over: Row | None, under: Row | None, digits: int = 2) -> str:
    return f"{over['ms'] / under['ms']:.{digits}f}" if over and under else NONE


def mask(case: Case) -> str:
    return "causal" if case.causal else "not causal"


def common(case: Case) -> str:
    """What all cases of a table share."""
    return f"{case.heads} heads, {case.dtype}"


def table(title: str, header: list[str], lines: list[list[str]], results: Results, shown: Iterable[str]) -> str:
    """A table in Markdown, what was skipped of the contenders shown, and where its figures come from."""
    first, *rest = ("| " + " | ".join(line) + " |" for line in (header, *lines))
    rows = [first, "|" + "---|" * len(header), *rest]
    return "\n".join([f"{title}:", "", *rows, "", *notes(results, shown), sources(results)])


def notes(results: Results, shown: Iterable[str]) -> list[str]:
    names = set(shown)
    runs = {id(found.run): found.run for found in results.values()}.values()
    rows = [
        row
        for run in runs
        for row in run["results"]
        if row["contender"] in names and (found := results.get(report.case_of(row))) and found.run is run
    ]
    return [f"Skipped: {line}." for line in report.skipped(rows)]


def sources(results: Results) -> str:
    """The runs that some cases are from."""
    names = dict.fromkeys(found.run["name"] for found in results.values())
    return f"({'Runs' if len(names) > 1 else 'Run'} {', '.join(names)}.)"


def runs_table(runs: dict[Path, Run], page: Path) -> str:
    """What each run was made with."""
    rows = [
        f"| [{run['name']}]({relative(path, page)}) | {report.source(run)} | `{run['command']}` |"
        for path, run in runs.items()
    ]
    return "\n".join(["The runs:", "", "| run | device, versions, commit | command |", "|---|---|---|", *rows])


def relative(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def paper_table(results: Results) -> str:
    """Each pass of the paper's kernel against plain attention, and against what the machine could do."""
    cases = select(results, lambda case: case.kernel == PAPER and case.causal and case.batch == 1 and not case.decodes)
    if not cases:
        return ""
    n = report.typical_length(cases)
    cases = select(cases, lambda case: case.nk == n)
    sdpa = present(cases, SDPA)
    lines = []
    for case, (rows, _) in cases.items():
        ours = best(rows)
        lines.append(
            [
                str(case.head_dim),
                case.pass_name,
                figure(ours),
                ours["contender"].removeprefix("mtagen "),
                *(ratio(ours, rows.get(name)) for name in sdpa),
                f"{ours['fraction']:.0%}" if "fraction" in ours else NONE,
            ]
        )
    header = ["d", "pass", "mtagen, ms", "backend", *(f"/ {name}" for name in sdpa), "of the roofline"]
    title = f"(6, 11), causal, N = {n}, B = 1, {common(next(iter(cases)))}; medians, multiples of plain attention's "
    title += "time, and the share of the speed at which the plan's flop and bytes would keep this machine busy"
    return table(title, header, lines, cases, (*OURS, *SDPA))


def peers_table(results: Results) -> str:
    """Training steps of the paper's kernel against those who materialise scores."""
    cases = {case: found for case, found in training_steps(results).items() if best(found.rows, PEERS)}
    if not cases:
        return ""
    peers = present(cases, PEERS)
    lines = [
        [
            *(str(case.head_dim), str(case.nk), str(case.batch), figure(ours := best(rows))),
            *(figure(rows.get(name)) for name in peers),
            ratio(best(rows, PEERS), ours, digits=1),
        ]
        for case, (rows, _) in cases.items()
    ]
    title = f"Forward + backward against PyTorch, (6, 11), causal, {common(next(iter(cases)))}"
    title += ". Liger-Kernel's op is another, its convolution follows the softmax" if PEERS[-1] in peers else ""
    header = ["d", "N", "B", "mtagen, ms", *(f"{name}, ms" for name in peers), "speed-up over the best of them"]
    return table(title, header, lines, cases, PEERS)


def kernels_table(results: Results) -> str:
    """Forward and backward of all kernels on each backend."""
    steps = TRAINING[:2]
    cases = select(results, lambda case: case.pass_name in steps and case.batch == 1)
    if not cases:
        return ""
    n = report.typical_length(cases)
    cases = select(cases, lambda case: case.nk == n)
    backends = present(cases, BACKENDS)
    peer = present(cases, ("sdpa cudnn", "sdpa"))[:1]
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for case, (rows, _) in cases.items():
        line = lines.setdefault((str(case.kernel), mask(case), str(case.head_dim)), {})
        for name in backends:
            ours = rows.get(name)
            line[f"{case.pass_name}, {name.removeprefix('mtagen ')}"] = " ".join(
                [figure(ours), *(f"({ratio(ours, rows.get(plain))})" for plain in peer if ours)]
            )
    columns = [f"{step}, {name.removeprefix('mtagen ')}" for step in steps for name in backends]
    title = f"All kernels, N = {n}, B = 1, {common(next(iter(cases)))}; ms" + "".join(f" (/ {name})" for name in peer)
    body = [[*key, *(line.get(column, NONE) for column in columns)] for key, line in lines.items()]
    return table(title, ["kernel", "mask", "d", *columns], body, cases, backends)


def lengths_table(results: Results) -> str:
    """Time and memory of training steps of the paper's kernel over N."""
    cases = training_steps(results)
    if not cases:
        return ""
    d = max(case.head_dim for case in cases)
    cases = select(cases, lambda case: case.head_dim == d)
    plain = present(cases, ("sdpa cudnn", "sdpa"))
    sized = any(best(rows).get("peak_MiB") is not None for rows, _ in cases.values())  # on a GPU
    lines = []
    for case, (rows, _) in cases.items():
        ours = best(rows)
        times = [figure(ours), *(figure(rows.get(name)) for name in plain)]
        lines.append([str(case.nk), str(case.batch), *times, *([figure(ours, "peak_MiB")] if sized else [])])
    title = f"Forward + backward over N, (6, 11), causal, d = {d}, {common(next(iter(cases)))}"
    header = ["N", "B", *(f"{name}, ms" for name in ("mtagen", *plain)), *(["mtagen, peak MiB"] if sized else [])]
    return table(title, header, lines, cases, plain)


def memory_table(results: Results) -> str:
    """Peak memory of one sequence."""
    cases = select(training_steps(results), lambda case: case.batch == 1)
    if not cases:
        return ""
    names = present(cases, (*OURS, *PEERS, *SDPA))
    lines = [
        [str(case.nk), str(case.head_dim), *(figure(rows.get(name), "peak_MiB") for name in names)]
        for case, (rows, _) in cases.items()
    ]
    title = "Peak MiB of forward + backward beyond inputs, output and gradients, (6, 11), causal, B = 1, "
    return table(title + common(next(iter(cases))), ["N", "d", *names], lines, cases, names)


def training_steps(results: Results) -> Results:
    """Forward + backward of the paper's kernel, causal, at the smallest batch of each length."""
    cases = select(results, lambda case: case.kernel == PAPER and case.causal and case.pass_name == TRAINING[2])
    return {case: cases[case] for case in report.smallest_batches(cases)}


def decode_table(results: Results) -> str:
    """Decode on each backend against plain attention's."""
    cases = select(results, lambda case: case.kernel == PAPER and case.decodes)
    if not cases:
        return ""
    backends, peer = present(cases, BACKENDS), present(cases, ("sdpa flash", "sdpa"))[:1]
    header = ["B", "Nk", "d", "heads of keys", "new tokens"]
    for name in backends:
        header += [f"{name.removeprefix('mtagen ')}, ms", "GB/s", *(f"/ {plain}" for plain in peer)]
    header += [f"{plain}, ms" for plain in peer]
    lines = []
    for case, (rows, _) in cases.items():
        line = [str(size) for size in (case.batch, case.nk, case.head_dim, case.kv_heads, case.nq)]
        for ours in map(rows.get, backends):
            line += [figure(ours), figure(ours, "gbps"), *(ratio(ours, rows.get(plain)) for plain in peer)]
        lines.append(line + [figure(rows.get(plain)) for plain in peer])
    return table(f"Decode, (6, 11), {common(next(iter(cases)))}", header, lines, cases, (*backends, *peer))


def overhead_table(results: Results) -> str:
    """What a forward call costs where sequences are short: CPU time, and the time without it."""
    cases = select(results, lambda case: case.pass_name == "forward")
    lines = [
        [
            *(str(case.kernel), str(case.head_dim), str(case.nk), str(case.batch)),
            name.removeprefix("mtagen "),
            *(figure(rows[name], key) for key in ("ms", "graph_ms", "cpu_us")),
        ]
        for case, (rows, _) in cases.items()
        for name in OURS
        if name in rows
    ]
    if not cases:
        return ""
    header = ["kernel", "d", "N", "B", "backend", "ms", "in a CUDA graph, ms", "us to issue a call"]
    served = ("mtagen auto", *BACKENDS)  # where auto is all of one backend it is no contender; on an H200, CUDA
    longest = max(next(rows[name] for name in served if name in rows)["cpu_us"] for rows, _ in cases.values())
    verdict = f"{'met' if longest <= MAX_CPU_US else '**not met**'}, up to {number(longest)} us"
    limit = f"the goal is that the CPU issues a call of auto in {MAX_CPU_US} us: {verdict}"
    return table(f"Forward of short sequences, {common(next(iter(cases)))}; {limit}", header, lines, cases, ())


def goals_table(results: Results) -> str:
    """Each goal and whether it is met."""
    lines, cases = [], {}
    for goal in GOALS:
        found = results.get(goal.case)
        rows = found.rows if found else {}
        ours, peer = rows.get(goal.contender), rows.get(goal.peer)
        measured, verdict = "not measured", NONE
        if found and ours and peer:
            cases[goal.case] = found
            measured = ratio(ours, peer)
            verdict = "yes" if ours["ms"] <= goal.limit * peer["ms"] else "**no**"
        step = goal.step if goal.causal else f"{goal.step}, not causal"
        sizes = [str(size) for size in (goal.head_dim, goal.batch, goal.n)]
        what = f"{goal.contender} / {goal.peer}"
        lines.append([what, str(goal.kernel), step, *sizes, f"{goal.limit:g}", measured, verdict])
    if not cases:
        return ""
    header = ["times", "kernel", "pass", "d", "B", "N", "at most", "measured", "met"]
    return table("Goals, as multiples of plain attention's time; causal, bf16", header, lines, cases, ())


def slow_cases(results: Results) -> str:
    """Where a training step is slower than in plain PyTorch."""
    steps = select(results, lambda case: case.pass_name == TRAINING[2])
    compared = {case: found for case, found in steps.items() if best(found.rows, SAME_MATH)}
    if not compared:
        return ""
    slow = [
        f"{mask(case)} {report.name_size(case)} d={case.head_dim} ({ratio(best(rows), best(rows, SAME_MATH))})"
        for case, (rows, _) in compared.items()
        if best(rows)["ms"] > best(rows, SAME_MATH)["ms"]
    ]
    verdict = f"{len(slow) or 'none'} of {len(compared)} cases"
    listed = ":\n" + ",\n".join(slow) if slow else ""
    return f"Forward + backward is slower than eager or torch.compile in {verdict}{listed}.\n\n{sources(compared)}"


class Part(NamedTuple):
    """A part of a device's section.

    Attributes:
        write: makes it of the merged runs.
        key: the measurement that it is about.
        names: the contenders that it wants from one run; () for all.
        suite: whose runs it prefers.
    """

    write: Callable[[Results], str]
    key: str = "ms"
    names: Collection[str] = ()
    suite: str = ""


HEADLINES = (  # those in the README
    Part(paper_table, names=(*OURS, *SDPA)),
    Part(peers_table, names=PEERS),
    Part(slow_cases, names=SAME_MATH),
)
PARTS = (
    *HEADLINES,
    Part(kernels_table, names=(*OURS, *SDPA)),
    Part(lengths_table, names=(*OURS, *SDPA)),
    Part(memory_table, "peak_MiB", suite="memory"),
    Part(decode_table, names=(*OURS, *SDPA)),
    Part(overhead_table, "cpu_us", OURS),
    Part(goals_table),
)


def load_runs(folder: Path) -> dict[Path, Run]:
    """The runs in a folder; other JSON files there have no ``results`` or no ``rates``.

    Raises:
        InputError: as :func:`mtagen.bench.report.load`.
    """
    paths = sorted(folder.glob("*.json"))
    return {path: report.load(path) for path in paths if {"results", "rates"} <= json.loads(path.read_text()).keys()}


def by_device(runs: dict[Path, Run]) -> dict[str, dict[Path, Run]]:
    """The runs of each device under its name, GPUs first; each run has its file's name."""
    devices: dict[str, dict[Path, Run]] = {}
    for path, run in sorted(runs.items(), key=lambda item: report.on_cpu(item[1])):
        devices.setdefault(report.device(run), {})[path] = {**run, "name": path.stem}
    return devices


def tables(runs: Collection[Run], parts: Iterable[Part]) -> list[str]:
    """Those parts of a device's section that its runs have something for."""
    return [text for part in parts if (text := part.write(merge(runs, part.key, part.names, part.suite)))]


def plots(paths: Iterable[Path], page: Path) -> list[str]:
    return [f"![{path.stem}]({relative(path.with_suffix('.png'), page)})" for path in paths]


def headlines(runs: dict[Path, Run], page: Path) -> str:
    """What stands between the README's marks: for each device the main tables, and the plot of its fullest run."""
    blocks = []
    for name, by_path in by_device(runs).items():
        fullest = max(by_path, key=lambda path: len(by_path[path]["results"]))
        blocks += [f"### {name}", *tables(by_path.values(), HEADLINES), *plots([fullest], page)]
    return "\n\n".join(blocks) or "Nothing was measured."


def results_page(runs: dict[Path, Run], page: Path) -> str:
    """All tables of all devices, a plot of each suite's fullest run, and what the runs were made with."""
    blocks = [RESULTS_HEAD]
    for name, by_path in by_device(runs).items():
        fullest: dict[str, Path] = {}
        for path, run in sorted(by_path.items(), key=lambda item: len(item[1]["results"])):
            fullest[report.suite(run)] = path
        blocks += [f"## {name}", *tables(by_path.values(), PARTS)]
        blocks += [*plots(sorted(fullest.values()), page), runs_table(by_path, page)]
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would change")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder of the runs")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks/RESULTS.md", help="file for all tables")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the marks")
    args = parser.parse_args(arguments)
    runs = load_runs(args.results)
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
        report.plot(run, path.with_suffix(".png"))
    for path, new in made.items():
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
