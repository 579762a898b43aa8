"""What is made of benchmark runs: tables, plots, comparisons, and the README's figures."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from mtagen.bench import compare, plots, report, runs, summary
from mtagen.bench.columns import number
from mtagen.bench.expressions import expressions
from mtagen.bench.names import FLEX
from mtagen.bench.suites import suite
from mtagen.bench.tables import Table, print_table, to_markdown
from mtagen.errors import InputError
from mtagen.measure.cases import PAPER, Case, Sizes
from mtagen.spec import Spec

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "render.py"
# How many times the roofline's time each contender takes in synthetic runs.
FACTORS = {
    "mtagen cuda": 2.0,
    "mtagen triton": 4.0,
    "eager": 90.0,
    "torch.compile": 40.0,
    "authors": 100.0,
    "authors compiled": 50.0,
    "liger (post-softmax)": 120.0,
    "sdpa flash": 1.9,
    "sdpa cudnn": 1.0,
}
NO_LIGER = "liger-kernel is not installed; pip install 'mtagen[bench]'"


def measurement(case: Case, contender: str) -> dict[str, Any]:
    """A row whose figures follow from the case's sizes, with a spread of 2 %."""
    gib = case.cache_bytes / 2**30
    flop = case.visible_scores * case.spec.head_dim * (2 if "back" in case.pass_name else 1)
    bound = gib / 4 if case.decodes else 1e-11 * flop
    ms = FACTORS[contender] * bound
    row = {**case.to_dict(), "contender": contender, "ms": ms, "low_ms": 0.99 * ms, "high_ms": 1.01 * ms, "repeats": 9}
    row |= {"gbps": case.cache_bytes / ms / 1e6} if case.decodes else {"tflops": case.visible_scores / ms / 1e6}
    if case.pass_name.startswith("forward"):
        row["peak_MiB"] = 10 * FACTORS[contender]
    if contender.startswith("mtagen"):
        row |= {"roofline_ms": bound, "fraction": bound / ms, "error": 1e-3, "allowed": 8e-3}
    return row


def make_run(cases: list[Case], command: str = "mtagen bench --suite full") -> dict[str, Any]:
    """A run on an H200: no Liger, eager up to N = 16384 only, decode without contenders that cannot."""
    rows = []
    for case in cases:
        for contender in FACTORS:
            if contender.startswith("liger"):
                rows.append({**case.to_dict(), "contender": contender, "skipped": NO_LIGER})
            elif contender == "eager" and case.sizes.nk > 16384:
                rows.append({**case.to_dict(), "contender": contender, "skipped": f"needs {case.sizes.nk} GiB"})
            elif contender.startswith("authors") and (case.spec.convolves_only or case.decodes):
                continue
            elif not (case.decodes and contender == "torch.compile"):
                rows.append(measurement(case, contender))
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "sm_count": 132, "memory": 150109880320}
    environment = {"mtagen": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "nvrtc": "13.0", "cuda_driver": "580.159"}
    return {
        "command": command,
        "environment": {**environment, "gpus": [gpu], "cpu": "Intel(R) Xeon(R)"},
        "commit": "1afe34d0abcd",
        "rates": {"tensor_tflops": 700.0, "dram_gbps": 4200.0},
        "results": rows,
    }


def on_cpu(run: dict[str, Any]) -> dict[str, Any]:
    """The same with the contenders that a CPU has."""
    run = copy.deepcopy(run)
    run["environment"] |= {"gpus": [], "triton": None, "nvrtc": None, "cuda_driver": None}
    names = {"mtagen cuda": "mtagen torch", "eager": "eager", "sdpa cudnn": "sdpa"}
    run["results"] = [
        row | {"contender": names[row["contender"]]} for row in run["results"] if row["contender"] in names
    ]
    return run


def overhead_run(slowest: float = 47.0) -> dict[str, Any]:
    """Issuing a call of cuda takes ``slowest`` us at most, of triton always 130."""
    run = make_run(suite("overhead", "cuda"), "mtagen bench --suite overhead")
    for row in run["results"]:
        if "ms" in row:
            of_cuda = slowest if row["nk"] == 1024 else 40.0
            row |= {"cpu_us": 130.0 if row["contender"] == "mtagen triton" else of_cuda, "graph_ms": row["ms"] / 2}
    return run


def data_run(window: float = 1.5, dropout: float = 1.1, packed: float = 0.8) -> dict[str, Any]:
    """Times of windows and dropout, as multiples of what is predicted, and of packed documents, of their own calls'."""
    run = make_run(suite("data", "cuda"), "mtagen bench --suite=data")
    rows = []
    for row in run["results"]:
        if not row["contender"].startswith("mtagen"):
            continue
        case, ms = Case.from_dict(row), row["ms"]
        if case.spec.packed and row["contender"] == "mtagen cuda":
            for form, ours in (("one by one", packed), ("padded", packed / 2)):
                rows.append(row | {"contender": f"mtagen cuda {form}", "ms": ms / ours})
        if case.base == case and row["contender"] == "mtagen triton":
            for target, times in (("sm_80", 1.9), ("sm_89", 2.1)):
                rows.append(row | {"contender": f"mtagen triton {target}", "ms": times * ms})
        slowdown = window if case.spec.window != (-1, -1) else dropout if case.spec.dropout else 1
        rows.append(row | {"ms": slowdown * ms})
    return run | {"results": rows}


def scores_run(slowdown: float = 1.25) -> dict[str, Any]:
    """Times of expressions, as multiples of those without, and of FlexAttention, twice ours."""
    run = make_run(suite("scores", "cuda"), "mtagen bench --suite=scores")
    rows = []
    for row in run["results"]:
        case = Case.from_dict(row)
        if case.base != case and row["contender"].startswith(("sdpa", "liger")):
            continue
        if "ms" in row and case.base != case:
            row = row | {"ms": slowdown * row["ms"]}
        rows.append(row)
        if row["contender"] == "mtagen cuda" and case.spec.kernel is None:
            rows.append(row | {"contender": FLEX, "ms": 2 * row["ms"]})
    return run | {"results": rows}


RUNS = {
    **{
        name: make_run(suite(name, "cuda"), f"mtagen bench --suite {name}")
        for name in ("quick", "full", "decode", "memory", "layers")
    },
    "overhead": overhead_run(),
    "cpu": on_cpu(make_run(suite("quick", "cpu"))),
}
ONE = Case(Spec(PAPER, 128), Sizes(1, 16, 16, 8192, 8192), "forward")


def altered(case: Case, pass_name: str | None = None, **fields: Any) -> Case:
    """The case with other fields of its spec and sizes."""
    sizes = {name: fields.pop(name) for name in Sizes._fields if name in fields}
    spec = replace(case.spec, **{"value_head_dim": None} | fields)
    return Case(spec, case.sizes._replace(**sizes), pass_name or case.pass_name)


def printed(run: dict[str, Any], width: int = 120) -> str:
    console = Console(file=StringIO(), width=width)
    report.print_run(run, console)
    return console.file.getvalue()


def cells(text: str) -> str:
    return re.sub(r"[ \n]+", " ", text)


def test_table_shows_times_ratios_rates_and_reasons() -> None:
    run = make_run([ONE, altered(ONE, nq=32768, nk=32768)])
    text = printed(run)
    assert "forward, causal, d = 128, 16 heads, bf16" in text
    ours, cudnn = (measurement(ONE, name) for name in ("mtagen cuda", "sdpa cudnn"))
    assert f"{number(ours['ms'])} 2.00x" in text
    assert f"{number(ours['tflops'])}   50%" in text
    assert number(cudnn["ms"]) in text
    assert text.count("liger (post-softmax)") == 1
    assert f"skipped: liger (post-softmax): {NO_LIGER}\n" in text
    assert "skipped: eager: needs 32768 GiB (1 of 2 cases: 6,11 B=1 N=32768)\n" in text
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, NVRTC 13.0, driver 580.159, commit 1afe34d0abcd" in cells(text)
    assert "700 TFLOP/s, 4200 GB/s" in text
    assert "spread 2%" not in text


def test_table_shows_a_wide_spread() -> None:
    run = make_run([ONE])
    row = run["results"][0]
    row["high_ms"] = 1.11 * row["ms"]
    assert printed(run).count("spread 12%") == 1


def test_table_of_decode_shows_bandwidth() -> None:
    case = altered(ONE, batch=8, nq=1, nk=32768, pass_name="decode")
    text = printed(make_run([case]))
    ours = measurement(case, "mtagen cuda")
    assert f"{number(ours['gbps'])}   50%" in text
    assert "decode, 1 new token, d = 128, 16 heads, bf16" in text


def test_tables_of_memory_and_overhead() -> None:
    assert "peak MiB: forward+backward, causal, d = 64" in printed(RUNS["memory"])
    text = printed(RUNS["overhead"])
    assert "CPU time of a call, us: forward, causal, d = 64" in text
    assert "in a CUDA graph, ms: forward, causal, d = 64" in text


def test_contender_of_few_cases_counts_its_own() -> None:
    run = make_run([ONE, altered(ONE, kernel=(1, 1))])
    run["results"].append({**ONE.to_dict(), "contender": "mtagen cuda sm_80", "skipped": "no room"})
    assert "skipped: mtagen cuda sm_80: no room\n" in printed(run)


def test_contenders_that_are_skipped_alike_share_a_line() -> None:
    run = make_run([ONE, altered(ONE, kernel=(1, 1))])
    for name, case in (("mtagen cuda", ONE), ("mtagen triton", ONE), ("eager", altered(ONE, kernel=(1, 1)))):
        run["results"] = [row for row in run["results"] if row["contender"] != name]
        run["results"].append({**case.to_dict(), "contender": name, "skipped": "no room"})
    text = printed(run)
    assert "skipped: mtagen cuda, mtagen triton, eager: no room\n" in text
    assert text.count("no room") == 1


def test_cases_that_are_lost_to_eager_are_counted() -> None:
    run = make_run([ONE, altered(ONE, kernel=(1, 1))])
    assert "longer than eager" not in printed(run)
    eager = next(row for row in run["results"] if row["contender"] == "eager")
    eager |= {"ms": 1e-6, "low_ms": 1e-6, "high_ms": 1e-6}
    assert "mtagen takes longer than eager in 1 of 2 cases: whole scores of short sequences are cheap" in printed(run)


def test_interrupted_run_says_so() -> None:
    run = make_run([ONE]) | {"interrupted": True}
    assert "commit 1afe34d0abcd, interrupted" in printed(run)
    assert "commit 1afe34d0abcd, interrupted | `mtagen bench" in rendered(run)
    assert "interrupted" in printed(run | {"rates": None, "results": []})


def test_widest_table_is_readable_at_120_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"mtagen auto": 2.0, "mtagen cuda sm_80": 3.0, "mtagen cuda deterministic": 3.0}
    monkeypatch.setattr(sys.modules[__name__], "FACTORS", FACTORS | wide)
    rows = [measurement(altered(ONE, kernel=(11, 11), nq=65536, nk=65536), name) for name in FACTORS]
    text = printed(make_run([]) | {"results": rows})
    assert max(map(len, text.splitlines())) <= 120
    for row in rows:
        assert re.search(rf"(^| ){re.escape(number(row['ms']))}( |$)", text, re.MULTILINE), row["contender"]
        assert re.search(rf"(^| ){re.escape(number(row['tflops']))}( |$)", text, re.MULTILINE), row["contender"]
    assert "…" not in text


@pytest.mark.parametrize("name", [*RUNS, "data", "scores"])
def test_plot_is_an_image(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.png"
    plots.plot_run((RUNS | {"data": data_run(), "scores": scores_run()})[name], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_panels_show_what_was_measured() -> None:
    sections = list(plots._sections(runs.measurements(RUNS["full"])))
    titles = [panel.title for section in sections for panel in section]
    assert len(titles) == len(set(titles)) + 2  # peak memory has the groups of forward+backward once more
    assert all("not causal" not in title for title in titles)
    time = sections[0][0]
    assert time.title.startswith("6,11: forward, causal, d = 64")
    assert set(time.lines) == {name for name in FACTORS if not name.startswith(("liger", "authors"))}
    assert list(time.lines["eager"]) == [512, 1024, 2048, 4096, 8192, 16384]
    ratios = sections[-1][0]
    assert ratios.lines["mtagen triton"] == pytest.approx(
        dict.fromkeys(("1,1", "3,3", "2,9", "6,11", "7,7", "11,11"), 4)
    )
    (rates,) = plots._sections(runs.measurements(RUNS["decode"]))
    assert {panel.label for panel in rates} == {"GB/s"}
    assert [panel.title for panel in rates[:3]] == [
        "6,11: decode, 1 new token, d = 64, 16 heads, bf16",
        "6,11: decode, 1 new token, d = 64, 16 heads, 4 of keys, bf16",
        "6,11: decode, 4 new tokens, d = 64, 16 heads, bf16",
    ]


def test_panels_show_what_data_costs() -> None:
    *_, costs = plots._sections(runs.measurements(data_run()))
    panels = {panel.title: panel for panel in costs}
    assert len(panels) == len(costs) == 12  # three passes of: dropout at two head dims, windows, packed documents
    window = panels["forward, causal, window (1024, -1), d = 128, 16 heads, bf16"]
    assert window.label == "time / predicted"
    assert window.lines == {
        name: pytest.approx(dict.fromkeys(("6,11", "mix 16 | mix 16", "6,11 mix 16 | 6,11 mix 16"), 1.5))
        for name in ("mtagen cuda", "mtagen triton")
    }
    dropout = panels["backward, causal, dropout, d = 128, 16 heads, bf16"]
    assert [*dropout.lines["mtagen cuda"].values()] == [pytest.approx(1.1)] * 5
    packed = panels["forward+backward, causal, packed, d = 128, 16 heads, bf16"]
    assert packed.label == "time / one by one"
    assert [*packed.lines] == ["mtagen cuda"]
    assert [*packed.lines["mtagen cuda"].values()] == [pytest.approx(0.8)] * 5


@pytest.mark.parametrize(("name", "panels"), [("full", 14), ("quick", 8), ("decode", 2), ("layers", 14), ("cpu", 4)])
def test_plot_draws_what_has_several_points(name: str, panels: int, tmp_path: Path, monkeypatch: Any) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_draw", lambda panel, ax: drawn.append(panel))
    plots.plot_run(RUNS[name], tmp_path / "run.png")
    assert len(drawn) == panels
    drawn.clear()
    plots.plot_run(make_run([ONE]), tmp_path / "run.png")
    assert [panel.label for panel in drawn] == ["ms", "time / sdpa cudnn"]


def test_plot_refuses_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"plot: got .*run\.txt.*suffix.*\.png"):
        plots.check_path(tmp_path / "run.txt")
    with pytest.raises(InputError, match="no measurement"):
        plots.plot_run(make_run([]), tmp_path / "run.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'mtagen\[bench\]'"):
        plots.check_path(tmp_path / "run.png")


def slower(run: dict[str, Any], before: dict[str, Any], *threshold: float) -> list[compare.Pair]:
    return compare.slower(compare.pairs(run, before), *threshold)


def slowed(run: dict[str, Any], factor: float) -> dict[str, Any]:
    return run | {"results": [row | {"ms": factor * row["ms"]} if "ms" in row else row for row in run["results"]]}


def test_comparison_flags_what_is_slower_by_more_than_the_threshold() -> None:
    before = make_run([ONE, altered(ONE, head_dim=64)])
    assert slower(slowed(before, 1.069), before) == []
    found = slower(slowed(before, 1.071), before)
    assert {row.contender for row in found} == {"mtagen cuda", "mtagen triton"}  # not the peers
    assert len(found) == len(compare.pairs(before, before)) == 4
    assert all(row.ratio == pytest.approx(1.071) for row in found)
    assert slower(slowed(before, 1.071), before, 0.08) == []
    console = Console(file=StringIO(), width=120)
    report.print_comparison(found, 4, console)
    assert "4 of 4 measurements are slower" in console.file.getvalue()
    assert "1.07" in console.file.getvalue()


def test_comparison_puts_the_worst_first() -> None:
    before = make_run([ONE])
    run = copy.deepcopy(before)
    for row, factor in zip(run["results"], (1.2, 1.5), strict=False):
        row["ms"] *= factor
    assert [row.contender for row in slower(run, before)] == ["mtagen triton", "mtagen cuda"]


def test_runs_that_do_not_compare_are_refused() -> None:
    run, other = make_run([ONE]), make_run([ONE])
    other["environment"]["gpus"][0]["name"] = "NVIDIA A100"
    with pytest.raises(InputError, match=r"against: got 'NVIDIA A100'; .*times cannot be compared.*H200"):
        slower(run, other)
    with pytest.raises(InputError, match="no measurement of mtagen in common"):
        slower(run, make_run([altered(ONE, head_dim=64)]))


def test_one_table_is_written_and_printed() -> None:
    table = Table("Times", ["kernel", "mtagen cuda, ms"], [["6,11", "0.5"], ["3,3", ""]], keys=1, notes=["(Run one.)"])
    assert to_markdown(table).splitlines() == [
        "Times:",
        "",
        "| kernel | mtagen cuda, ms |",
        "|---|---|",
        "| 6,11 | 0.5 |",
        "| 3,3 |  |",
        "",
        "(Run one.)",
    ]
    console = Console(file=StringIO(), width=30)
    print_table(table, console)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert printed == [
        "",
        "Times",
        "        mtagen",
        "         cuda,",
        "kernel      ms",
        "─" * 15,
        "  6,11     0.5",
        "   3,3",
        "(Run one.)",
    ]


def test_load_inverts_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RUNS["quick"]))
    assert runs.load(path) == RUNS["quick"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.pop("rates"), "no 'rates'"),
        (lambda run: run["environment"].pop("gpus"), "no 'gpus' in 'environment'"),
        (lambda run: run["results"][2].pop("batch"), r"no 'batch' in results\[2\]"),
        (lambda run: run["results"][2].pop("contender"), r"no 'contender' in results\[2\]"),
        (lambda run: run["results"][0].pop("ms"), r"neither 'skipped' nor a measurement \(no 'ms'\) in results\[0\]"),
        (lambda run: run["results"][0].pop("tflops"), r"no 'tflops'"),
        (lambda run: run["results"].insert(0, "row"), "an object is expected"),
        (lambda run: run.update(results=3), "'results' is no list"),
        (lambda run: run["results"][0].update(ms="1"), r"a wrong value in results\[0\]"),
        (lambda run: run["results"][0].update(ms=0), "a wrong value"),
        (lambda run: run["results"][0].update(kernel=3), "a wrong value"),
        (lambda run: run["results"][0].update(head_dim=[1]), "a wrong value"),
    ],
)
def test_what_is_no_run_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    run = make_run([ONE])
    change(run)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    with pytest.raises(InputError, match=message):
        runs.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is no benchmark run"):
        runs.load(path)


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render, alternate = load_script("render"), load_script("alternate")


def test_versions_are_measured_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of two rounds the least time of each case counts, so that one slow run on either side tells nothing."""
    base = make_run([ONE, altered(ONE, head_dim=64)])
    speeds = iter([1.0, 1.5, 1.3, 1.03, 1.0, 1.04, 1.3, 1.019])  # before, now, before, now; twice
    options = ["--suite", "quick"]
    asked = []

    def bench(checkout: Path, given: list[str]) -> dict[str, Any]:
        asked.append(checkout)
        assert given == options
        return slowed(base, next(speeds))

    monkeypatch.setattr(alternate, "bench", bench)
    kept = tmp_path / "both.json"
    for status, slow in ((1, 4), (0, 0)):
        with pytest.raises(typer.Exit) as ended:
            alternate.main(tmp_path, options, rounds=2, threshold=0.02, json_path=kept)
        assert ended.value.exit_code == status
        assert f"{slow} of 4 measurements are slower" in capsys.readouterr().out
    assert asked == [tmp_path, ROOT] * 4
    both = json.loads(kept.read_text())
    assert both["before"] == base
    assert both["now"] == slowed(base, 1.019)


def in_files(*runs: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    return {Path(f"results/run{index}.json"): run for index, run in enumerate(runs)}


def rendered(*runs: dict[str, Any]) -> str:
    return str(render.results_page(in_files(*runs), Path("RESULTS.md")))


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_nothing_measured_is_said() -> None:
    for part in (render.figures({}), render.headlines({}), render.throughput([])):
        assert part == "Nothing was measured."
    assert render.training_steps([]) == ""


def test_performance_page_has_the_main_tables_of_all_devices() -> None:
    text = render.headlines(in_files(*RUNS.values()))
    assert lines(text, "### ") == ["### NVIDIA H200", "### Intel(R) Xeon(R)"]
    assert len(lines(text, "Forward + backward against PyTorch")) == 2
    assert len(lines(text, "Decode")) == 2
    assert not lines(text, "Goals")


def test_figures_are_of_the_greatest_head_dim_of_the_first_device() -> None:
    step = altered(ONE, pass_name="forward+backward")
    run = make_run([altered(step, head_dim=64), step, altered(step, nq=4096, nk=4096), ONE])
    head, _, *figures = render.figures(in_files(RUNS["cpu"], run)).splitlines()
    assert head == (
        "On one NVIDIA H200, forward + backward of an op that convolves 6 x 11 scores, causal, N = 8192, B = 1, "
        "d = 128, 16 heads, bf16:"
    )
    ms = {name: number(measurement(step, name)["ms"]) for name in FACTORS}
    speed, plain, memory = figures
    eager, compiled = f"{ms['eager']} (eager)", f"{ms['torch.compile']} (torch.compile)"
    assert speed == (
        f"- **20 times as fast** as PyTorch: {ms['mtagen cuda']} ms instead of {eager} and {compiled}; 20 at d = 64."
    )
    assert plain.startswith("- **2.0 times the time of plain attention**")
    assert f"{ms['mtagen cuda']} ms instead of {ms['sdpa cudnn']} (sdpa cudnn) and {ms['sdpa flash']}" in plain
    assert memory.startswith("- **20 MiB** beyond inputs, output and gradients instead of 900 (eager) and 400 (torch.c")


def test_figures_leave_out_what_was_not_measured() -> None:
    run = make_run([altered(ONE, pass_name="forward+backward")])
    run["results"] = [row for row in run["results"] if not row["contender"].startswith(("eager", "torch"))]
    (plain,) = lines(render.figures(in_files(run)), "- ")
    assert plain.startswith("- **2.0 times the time of plain attention**")
    assert render.figures(in_files(RUNS["decode"])) == "Nothing was measured."


def report_of(size: str, **tokens_per_s: float) -> dict[str, Any]:
    """What examples/gpt/throughput.py writes; a contender without a speed ran out of memory."""
    results = [
        {
            "contender": name.replace("_", "-"),
            "ms": 8192e3 / speed,
            "tokens_per_s": speed,
            "peak_gib": 20.25,
            "prepared_s": 7.0,
            "parameters": {"300M": 388, "1B": 1496}[size],
        }
        if speed
        else {"contender": name.replace("_", "-"), "error": "out of memory"}
        for name, speed in tokens_per_s.items()
    ]
    return {"environment": RUNS["full"]["environment"], "size": size, "batch": 4, "length": 2048, "results": results}


SMALL = report_of("300M", plain=8e4, plain_compiled=1e5, mta=5e4, mta_compiled=6e4, authors=4e3, authors_compiled=1e4)
LARGE = report_of("1B", plain=5e4, mta=3e4, authors=0)


def test_training_steps_show_the_faster_of_eager_and_compiled() -> None:
    text = render.training_steps([SMALL, LARGE])
    assert text.startswith("### Training step\n\nA training step of [whole models]")
    assert "on one NVIDIA H200" in text
    assert lines(text, "| 300M") + lines(text, "| 1B") == [
        "| 300M, 4 x 2048 | plain compiled | 82 | 100,000 | 1.00 | 10.00 | 20.2 |",
        "| 300M, 4 x 2048 | mtagen compiled | 137 | 60,000 | 0.60 | 6.00 | 20.2 |",
        "| 300M, 4 x 2048 | authors compiled | 819 | 10,000 | 0.10 | 1.00 | 20.2 |",
        "| 1B, 4 x 2048 | plain | 164 | 50,000 | 1.00 | – | 20.2 |",
        "| 1B, 4 x 2048 | mtagen | 273 | 30,000 | 0.60 | – | 20.2 |",
    ]


def test_throughput_shows_all_that_was_tried() -> None:
    text = render.throughput([SMALL, LARGE])
    assert text.startswith("NVIDIA H200, torch 2.11.0")
    assert len(lines(text, "| 300M")) == 6
    assert "| 300M, 4 x 2048 | mtagen | 164 | 50,000 | 0.50 | 5.00 | 20.2 |" in text.splitlines()
    assert "| 1B, 4 x 2048 | authors | out of memory | – | – | – | – |" in text.splitlines()


def test_page_has_all_parts_of_all_devices() -> None:
    text = rendered(*(run for name, run in RUNS.items() if name != "quick"))
    assert lines(text, "## ") == ["## NVIDIA H200", "## Intel(R) Xeon(R)"]  # the GPU first
    for name in (
        "(6, 11), causal, N = 8192",
        "All kernels, N",
        "Forward + backward against PyTorch",
        "Forward + backward over N",
        "Peak MiB",
        "Decode",
        "Goals",
    ):
        assert lines(text, name), name
    for suite_name in ("full", "decode", "overhead"):
        assert f"commit 1afe34d0abcd | `mtagen bench --suite {suite_name}` |" in text
    assert max(map(len, text.splitlines())) <= 200
    assert lines(text, "![") == [f"![run{index}](results/run{index}.png)" for index in range(6)]
    devices = len(lines(text, "## "))
    tables = text.count("|---|\n") - devices  # of figures: each device has one of its runs besides
    sentences = devices  # on what is slow
    assert len(re.findall(r"^\(Runs? run\d(?:, run\d)*\.\)$", text, re.MULTILINE)) == tables + sentences


@pytest.mark.parametrize("table", ["paper", "peers", "kernels", "lengths", "memory", "decode"])
def test_tables_of_kernels_leave_out_other_stages(table: str) -> None:
    named = {name: run | {"name": name} for name, run in RUNS.items()}
    write = getattr(summary, f"{table}_table")
    text = write(runs.merge([named["full"], named["decode"]]))
    assert text
    assert write(runs.merge([named["full"], named["decode"], named["layers"]])) == text
    assert write(runs.merge([named["layers"]])) == ""


def test_panels_over_lengths_show_one_layer() -> None:
    layers = make_run(suite("layers", "cuda"))
    shown = [row for row in layers["results"] if row.get("post_kernel") and row["heads"] == 16]
    others = [row for row in layers["results"] if row not in shown]
    section, *_ = plots._sections(
        runs.measurements(layers | {"results": [*shown, *slowed({"results": others}, 2)["results"]]})
    )
    assert {panel.title.partition(":")[0] for panel in section} == {"6,11 mix 16 | 6,11 mix 16"}
    (alone, *_) = plots._sections(runs.measurements(layers | {"results": shown}))
    assert section == alone


def test_paper_table_names_the_best_backend() -> None:
    run = make_run([ONE])
    run["results"] = [row for row in run["results"] if row["contender"] not in ("mtagen cuda", "sdpa flash")]
    ours = number(measurement(ONE, "mtagen triton")["ms"])
    text = rendered(run)
    assert lines(text, "| d |")[0] == "| d | pass | mtagen, ms | backend | / sdpa cudnn | of the roofline |"
    assert f"| 128 | forward | {ours} | triton | 4.00 | 25% |" in text.splitlines()


def test_peers_table_is_of_the_run_with_most_of_them() -> None:
    step = altered(ONE, pass_name="forward+backward")
    fewer, run = make_run([step]), make_run([step])
    fewer["results"] = [row for row in fewer["results"] if row["contender"] != "torch.compile"]
    names = ("mtagen cuda", "eager", "torch.compile")
    ms = " | ".join(number(measurement(step, name)["ms"]) for name in names)
    text = rendered(fewer, run)
    assert "| d | N | B | mtagen, ms | eager, ms | torch.compile, ms | speed-up over the best of them |" in text
    assert f"| 128 | 8192 | 1 | {ms} | 20.0 |" in text.splitlines()
    assert f"Skipped: liger (post-softmax): {NO_LIGER}." in text.splitlines()


def test_other_targets_are_not_the_best_backend() -> None:
    run = make_run([ONE])
    run["results"].append(run["results"][0] | {"contender": "mtagen cuda sm_80", "ms": 1e-6})
    assert rendered(run).count("e-06") == 0


def test_tables_leave_out_what_was_skipped() -> None:
    step = altered(ONE, pass_name="forward+backward")
    text = rendered(make_run([step, altered(step, nq=32768, nk=32768)]))
    (short, long) = lines(text, "| 128 | 8192 | 1 |") + lines(text, "| 128 | 32768 | 1 |")
    assert short.endswith("| 20.0 |")
    assert long.split(" | ")[4] == "–"
    assert "Skipped: eager: needs 32768 GiB (1 of 2 cases: 6,11 B=1 N=32768)." in text
    assert "| 8192 | 128 | 20 | 40 | 900 | 400 | 10 | 19 |" in text.splitlines()


def test_a_run_without_memory_has_no_column_of_it() -> None:
    run = on_cpu(make_run([altered(ONE, pass_name="forward+backward")]))
    assert "peak MiB" in rendered(run)
    for row in run["results"]:
        row["peak_MiB"] = None
    assert "peak MiB" not in rendered(run).replace("Peak", "peak")


def test_a_case_of_two_runs_is_that_of_the_fuller_one() -> None:
    fuller, other = make_run([ONE], "fuller"), make_run([ONE], "other")
    other["results"] = other["results"][:2]
    for index, both in enumerate(((fuller, other), (other, fuller))):
        assert f"(Run run{index}.)" in rendered(*both)
        assert f"(Run run{1 - index}.)" not in rendered(*both)
        assert "`fuller`" in rendered(*both)


def test_peak_memory_is_that_of_its_suite() -> None:
    case = altered(ONE, pass_name="forward+backward")
    other, memory = make_run([case]), make_run([case], "mtagen bench --suite=memory --head-dim=128")
    memory["results"] = memory["results"][:1]
    for row in memory["results"]:
        row["peak_MiB"] = 4321
    assert "| 8192 | 128 | 4321 |" in rendered(other, memory).splitlines()


def test_overhead_is_shown_although_another_run_has_the_case() -> None:
    text = rendered(RUNS["full"], RUNS["overhead"])
    assert len(lines(text, "| (6, 11) | 128 | 1024 | 8 | cuda |")) == 1
    assert "the CPU issues a call of auto in 60 us: met, up to 47 us:" in text
    assert "in 60 us: **not met**, up to 61 us:" in rendered(RUNS["full"], overhead_run(61.0))


def test_lines_are_in_order_whatever_the_order_of_runs() -> None:
    long, short = (make_run([altered(ONE, pass_name="forward+backward", nq=n, nk=n)]) for n in (16384, 8192))
    assert rendered(long, short).index("| 8192 | 1 |") < rendered(long, short).index("| 16384 | 1 |")


def test_cpu_run_on_a_machine_with_a_gpu_is_of_the_cpu() -> None:
    run = RUNS["cpu"] | {"environment": RUNS["quick"]["environment"]}
    assert runs.device(run) == "Intel(R) Xeon(R)"
    assert runs.device(RUNS["quick"]) == "NVIDIA H200"


def test_decode_table_shows_both_backends() -> None:
    case = altered(ONE, batch=8, nq=1, nk=32768, pass_name="decode")
    ms = {name: number(measurement(case, name)["ms"]) for name in FACTORS}
    cuda = f"{ms['mtagen cuda']} | 2147 | 1.05"
    triton = f"{ms['mtagen triton']} | 1074 | 2.11"
    assert (
        f"| 8 | 32768 | 128 | 16 | 1 | {cuda} | {triton} | {ms['sdpa flash']} |"
        in rendered(make_run([case])).splitlines()
    )


def test_goals_are_judged() -> None:
    text = rendered(make_run([ONE, altered(ONE, head_dim=64)]))
    cuda = "| mtagen cuda / sdpa cudnn | 6,11 | forward"
    assert f"{cuda} | 128 | 1 | 8192 | 1.9 | 2.00 | **no** |" in text
    assert f"{cuda} | 64 | 1 | 8192 | 2.2 | 2.00 | yes |" in text
    assert f"{cuda}, not causal | 128 | 1 | 8192 | 2.4 | not measured | – |" in text
    assert len(lines(text, "| mtagen ")) == len(render.GOALS) == 41


def test_goals_of_layers_are_judged() -> None:
    """Against plain attention, and against the authors' order of operations, as shares of its time."""
    mixing = {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16}
    step = altered(ONE, head_dim=64, batch=4, nq=2048, nk=2048, pass_name="forward+backward", **mixing)
    run = make_run([altered(ONE, **mixing), step])
    text = rendered(run)
    assert r"| mtagen cuda / sdpa cudnn | mix 16 \| mix 16 | forward | 128 | 1 | 8192 | 3.6 | 2.00 | yes |" in text
    eager = r"| mtagen cuda / authors | mix 16 \| mix 16 | forward+backward | 64 | 4 | 2048 | 1/18 | "
    assert f"{eager}0.0200 | yes |" in text
    (ours,) = (row for row in run["results"] if row["contender"] == "mtagen cuda" and row["nq"] == 2048)
    ours["ms"] *= 4
    assert f"{eager}0.0800 | **no** |" in rendered(run)


def test_layers_table_compares_with_all_who_compute_the_same() -> None:
    step = altered(ONE, pass_name="forward+backward", post_mixed_heads=2)
    text = summary.layers_table(runs.merge([make_run([step, altered(step, causal=False), ONE]) | {"name": "layers"}]))
    header, _, line = (row for row in text.splitlines() if row.startswith("|"))
    assert header == (
        "| stages | d | N | B | pass | mtagen, ms | / sdpa cudnn | eager, ms | torch.compile, ms | authors, ms "
        "| authors compiled, ms | speed-up over the best of them | mtagen, peak MiB |"
    )
    assert line.startswith(r"| 6,11 \| mix 2 | 128 | 8192 | 1 | forward+backward | ")
    assert line.endswith(" | 20.0 | 20 |")


def test_nothing_of_data_is_written_where_it_was_not_measured() -> None:
    text = rendered(*RUNS.values())
    assert "packed" not in text
    assert len(lines(text, "Goals")) == 1


def test_data_table_shows_what_data_costs() -> None:
    text = rendered(RUNS["full"], RUNS["layers"], data_run())
    assert len(lines(text, "Windows, packed documents and dropout, causal, 16 heads, bf16")) == 1
    (header,) = lines(text, "| stages | data |")
    assert header == (
        "| stages | data | d | N | B | pass | cuda, ms | / predicted | / cuda one by one | / cuda padded "
        "| triton, ms | / predicted |"
    )

    def ratios(stages: str, data: str, n: int, batch: int = 1) -> list[str]:
        (line,) = lines(text, f"| {stages} | {data} | 128 | {n} | {batch} | forward+backward |")
        _, predicted, one_by_one, padded, _, of_triton = line.strip("| ").split(" | ")[6:]
        return [predicted, one_by_one, padded, of_triton]

    assert ratios("6,11", "window (1024, -1)", 32768) == ["1.50", "–", "–", "1.50"]
    assert ratios(r"mix 16 \| mix 16", "window (1024, -1)", 16384) == ["1.50", "–", "–", "1.50"]
    assert ratios(r"6,11 \| mix 2", "dropout", 8192) == ["1.10", "–", "–", "1.10"]
    assert ratios("1,1", "packed", 8192, 16) == ["–", "0.80", "0.40", "–"]


def test_scores_table_shows_what_expressions_cost() -> None:
    text = rendered(RUNS["full"], scores_run())
    assert len(lines(text, "Score expressions and sinks, causal, B = 1, 16 heads, bf16")) == 1
    assert not lines(text, "Windows, packed documents")
    (header,) = lines(text, "| expression |")
    assert "| expression | kernel | d | pass | mtagen, ms | backend | / without | FlexAttention, ms |" in header
    rows = lines(text, "| softcap | ")
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        _, kernel, _, _, ours, backend, without, flex, *_ = row.strip("| ").split(" | ")
        assert (backend, without) == ("cuda", "1.25")
        assert (flex == "–") == (kernel == "6,11")
        assert flex == "–" or float(flex) == pytest.approx(2 * float(ours), rel=0.02)


def test_panels_show_what_expressions_cost() -> None:
    *_, costs = plots._sections(runs.measurements(scores_run()))
    panels = {panel.title: panel for panel in costs}
    points = panels["backward, causal, d = 128, 16 heads, bf16"].lines
    assert len(points["mtagen cuda"]) == 2 * len(expressions(16))
    assert points["mtagen cuda"]["6,11 alibi"] == pytest.approx(1.25)
    assert points[FLEX]["1,1 alibi"] == pytest.approx(1.25)


def test_goals_of_data_are_judged() -> None:
    def goals(run: dict[str, Any]) -> str:
        text = rendered(RUNS["full"], RUNS["layers"], run)
        assert len(lines(text, "Goals")) == 2
        return text.rpartition("Goals")[2]

    met, missed = goals(data_run()), goals(data_run(window=1.81, dropout=1.21, packed=1.2))
    assert len(lines(met, "| mtagen ")) == len(render.DATA_GOALS) == 31
    assert "not measured" not in met
    window = "| mtagen cuda / predicted | 6,11 | forward+backward, window (1024, -1) | 128 | 1 | 32768 | 1.8 |"
    assert f"{window} 1.50 | yes |" in met
    assert f"{window} 1.81 | **no** |" in missed
    dropout = "| mtagen cuda / predicted | 6,11 | backward, dropout | 128 | 1 | 8192 | 1.15 |"
    assert f"{dropout} 1.10 | yes |" in met
    assert f"{dropout} 1.21 | **no** |" in missed
    alone = r"| mtagen cuda / mtagen cuda one by one | mix 16 \| mix 16 | forward, packed | 128 | 16 | 8192 | 1.15 |"
    assert f"{alone} 0.80 | yes |" in met
    assert f"{alone} 1.20 | **no** |" in missed
    padded = "| mtagen cuda / mtagen cuda padded | 6,11 | forward+backward, packed | 128 | 16 | 8192 | 1 |"
    assert f"{padded} 0.40 | yes |" in met
    for target, verdict in (("sm_80", "1.90 | yes"), ("sm_89", "2.10 | **no**")):
        assert f"| mtagen triton {target} / mtagen triton | 6,11 | backward | 64 | 1 | 8192 | 2 | {verdict} |" in met


def test_what_is_predicted_is_of_the_same_run() -> None:
    """A base that another run has, on whatever day, tells nothing of what a window costs."""
    run = data_run()
    apart = [
        run | {"results": [row for row in run["results"] if ("dropout" in row) is dropping]}
        for dropping in (False, True)
    ]
    goals = rendered(*apart).rpartition("Goals")[2]
    assert "| backward, dropout | 128 | 1 | 8192 | 1.15 | not measured | – |" in goals


def test_slower_steps_are_listed() -> None:
    step = altered(ONE, pass_name="forward+backward")
    run = make_run([step, altered(step, head_dim=64)])
    assert "slower than eager or torch.compile in none of 2 cases." in rendered(run)
    eager = next(row for row in run["results"] if row["contender"] == "eager")
    eager["ms"] = 0.8 * next(row["ms"] for row in run["results"] if row["contender"] == "mtagen cuda")
    assert "in 1 of 2 cases:\ncausal 6,11 B=1 N=8192 d=128 (1.25).\n" in rendered(run)


def test_union_takes_each_contender_from_the_fuller_run() -> None:
    fuller, other = make_run([ONE]), slowed(make_run([ONE]), 2)
    fuller["results"] = [row for row in fuller["results"] if row["contender"] != "eager"]
    other["results"] = [row for row in other["results"] if row["contender"] in ("mtagen cuda", "eager")]
    for both in ((fuller, other), (other, fuller)):
        rows = runs.union(both)[ONE]
        assert rows["mtagen cuda"]["ms"] == measurement(ONE, "mtagen cuda")["ms"]
        assert rows["eager"]["ms"] == 2 * measurement(ONE, "eager")["ms"]
    first, second = make_run([ONE]), slowed(make_run([ONE]), 2)
    assert runs.union([first, second]) == runs.union([first])


def test_union_counts_only_the_contenders_that_it_is_given() -> None:
    fuller, other = make_run([ONE]), slowed(make_run([ONE]), 2)
    other["results"] = [row for row in other["results"] if row["contender"] in ("mtagen cuda", "eager")]
    fuller["results"] = [row for row in fuller["results"] if row["contender"] != "eager"]
    names = ("mtagen cuda", "eager")
    for both in ((fuller, other), (other, fuller)):
        rows = runs.union(both, names)[ONE]
        assert rows["mtagen cuda"]["ms"] == 2 * measurement(ONE, "mtagen cuda")["ms"]
        assert rows.keys() == runs.union(both)[ONE].keys()


def test_picture_of_training_steps_is_of_single_sequences() -> None:
    time, memory = json.loads(plots.picture_of_training_steps(runs.union([RUNS["full"], RUNS["layers"]]), "").shown)
    assert time["title"] == "6,11: forward+backward, causal, d = 128, 16 heads, bf16"
    assert (time["label"], memory["label"]) == ("ms / sequence", "peak MiB / sequence")
    assert set(time["lines"]) == {"mtagen", "eager", "torch.compile", "sdpa flash", "sdpa cudnn"}
    short = altered(ONE, pass_name="forward+backward", batch=16, nq=512, nk=512)
    assert time["lines"]["mtagen"]["512"] == pytest.approx(measurement(short, "mtagen cuda")["ms"] / 16)
    assert memory["lines"]["eager"]["512"] == pytest.approx(900 / 16)
    assert memory["lines"]["eager"]["8192"] == pytest.approx(900)


def test_picture_of_layers_has_all_who_compute_the_same() -> None:
    shown = json.loads(plots.picture_of_layers(runs.union([RUNS["full"], RUNS["layers"]]), "").shown)
    assert shown
    peers = {"eager", "torch.compile", "authors", "authors compiled", "sdpa cudnn"}
    for panel in shown:
        assert set(panel["lines"]) == {"mtagen"} | peers
        assert len(panel["lines"]["mtagen"]) > 1
        assert "6,11" not in panel["lines"]["mtagen"]


def test_pictures_of_nothing_are_refused(tmp_path: Path) -> None:
    for picture in (plots.picture_of_training_steps, plots.picture_of_layers, plots.picture_of_cases):
        with pytest.raises(InputError, match="no measurement"):
            picture({}, "nothing").save(tmp_path / "nothing.svg")


@pytest.mark.parametrize("name", ["training_steps", "layers"])
def test_a_picture_is_the_same_file_whenever_it_is_made(name: str, tmp_path: Path) -> None:
    picture = getattr(plots, f"picture_of_{name}")(runs.union([RUNS["full"], RUNS["layers"]]), "two runs")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        picture.save(path)
    assert first.read_bytes() == second.read_bytes()
    assert plots.shown_in(first) == picture.shown


PAGES = {
    "README.md": ("figures",),
    "docs/performance.md": ("training-step", "speed"),
    "examples/gpt/README.md": ("throughput",),
}


def empty_repository(root: Path) -> None:
    """Pages with nothing between their marks, a run, a report and another JSON file."""
    for name, parts in PAGES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        marks = "".join(f"<!-- {part}:begin -->\nold\n<!-- {part}:end -->\n" for part in parts)
        path.write_text(f"# Title\n{marks}rest\n")
    for folder in ("benchmarks/results", "examples/gpt/results"):
        (root / folder).mkdir(parents=True)
    step = altered(ONE, pass_name="forward+backward")
    run = make_run([step, altered(step, nq=4096, nk=4096, batch=2), ONE])
    (root / "benchmarks/results/full.json").write_text(json.dumps(run))
    (root / "benchmarks/results/other.json").write_text(json.dumps({"results": {}}))
    (root / "examples/gpt/results/1B.json").write_text(json.dumps(LARGE))
    (root / "examples/gpt/results/300M.json").write_text(json.dumps(SMALL))


def test_script_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_repository(tmp_path)
    where = ["--root", str(tmp_path)]
    assert render.main(["--check", *where]) == 1
    assert "run python benchmarks/render.py" in capsys.readouterr().err
    assert render.main(where) == render.main(["--check", *where]) == 0
    texts = {name: (tmp_path / name).read_text() for name in PAGES}
    for text in texts.values():
        assert text.startswith("# Title\n<!-- ")
        assert text.endswith(":end -->\nrest\n")
        assert "old" not in text
    assert "<!-- figures:begin -->\n\nOn one NVIDIA H200, " in texts["README.md"]
    steps = texts["docs/performance.md"]
    assert steps.index("| 300M") < steps.index("| 1B") < steps.index("### NVIDIA H200")
    assert "<!-- speed:begin -->\n\n### NVIDIA H200\n" in texts["docs/performance.md"]
    assert "| 1B, 4 x 2048 | authors | out of memory |" in texts["examples/gpt/README.md"]
    page = tmp_path / "benchmarks/RESULTS.md"
    assert page.read_text().endswith("| `mtagen bench --suite full` |\n")
    assert "| [full](results/full.json) | NVIDIA H200, torch 2.11.0" in page.read_text()
    assert [path.name for path in page.parent.glob("results/*.png")] == ["full.png"]
    pictures = tmp_path / "docs/pictures"
    assert sorted(path.name for path in pictures.iterdir()) == ["passes.svg", "training_steps.svg"]


def test_check_finds_each_page_and_picture_that_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_repository(tmp_path)
    where = ["--root", str(tmp_path)]
    render.main(where)
    for name, old, new in (
        ("README.md", "20 times", "30 times"),
        ("docs/performance.md", "| cuda |", "| x |"),
        ("examples/gpt/README.md", "60,000", "70,000"),
        ("benchmarks/RESULTS.md", "| yes |", "| no |"),
        ("docs/pictures/training_steps.svg", "ms / sequence", "s / sequence"),
    ):
        path = tmp_path / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        assert render.main(["--check", *where]) == 1
        assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == [str(path)]
        path.write_text(text)
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(SystemExit, match=r"README\.md has no part between <!-- figures:begin -->"):
        render.main(where)
    assert (tmp_path / "README.md").read_text() == "no marks"


def test_pages_show_the_committed_runs() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_cases_of_any_stages_are_in_one_order() -> None:
    """A stage that there is not has no extents to compare, and stands before those that are there."""
    stages: list[dict[str, Any]] = [
        {"kernel": None},
        {"kernel": None, "post_mixed_heads": 2},
        {"kernel": None, "mixed_heads": 4},
        {"kernel": None, "post_kernel": (2, 3)},
        {"kernel": (1, 1)},
        {"kernel": (6, 11), "post_kernel": (6, 11)},
    ]
    cases = [Case(Spec(head_dim=64, **one), Sizes(1, 4, 4, 256, 256), "forward") for one in stages]
    assert [*runs.merge([make_run(cases[::-1])])] == [*runs.merge([make_run(cases)])] == cases
