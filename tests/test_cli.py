"""Every command: help, output, exit statuses 0, 1 and 2."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from dataclasses import fields
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from test_accuracy import Sound
from typer.testing import CliRunner, Result

import mtagen
from mtagen.accuracy import Comparison
from mtagen.bench.tables import Table, print_table
from mtagen.cli import app
from mtagen.codegen import render
from mtagen.codegen.host import codes
from mtagen.planner import Plan, plan
from mtagen.runtime.disk_cache import Cache, cache_key
from mtagen.spec import Spec

COMMANDS = ("emit", "plan", "list", "show-config", "collect-env", "clear-cache", "check", "bench", "tune")
SELECTION = ("--kernel", "6,11", "--head-dim", "64")
STAGES = ("--kernel", "none", "--mixed-heads", "4", "--post-kernel", "2,3", "--post-mixed-heads", "2")
SMALL = ("--kernel", "2,3", "--head-dim", "16", "--device", "cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return Cache()


def run(*arguments: str | Path, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)


def output(*arguments: str | Path, answer: str | None = None) -> str:
    result = run(*arguments, answer=answer)
    assert result.exit_code == 0, result.output
    return result.stdout


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def fill(cache: Cache) -> None:
    cache.get_or_build("mta_some", "sm_90a", cache_key("some"), lambda: {"kernel.py": b"x" * 2048})


def test_help_names_every_command() -> None:
    text = output("--help")
    assert all(command in text for command in COMMANDS)


def test_version() -> None:
    assert output("--version") == f"mtagen {mtagen.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    assert f"mtagen {command}" in output(command, "--help").replace("root", "mtagen")


@pytest.mark.parametrize("command", ["emit", "plan", "check"])
def test_selection_options_are_the_fields_of_the_spec(command: str) -> None:
    text = output(command, "--help")
    options = {field.name.replace("_", "-") for field in fields(Spec)}
    # Each parameter and constant is an option of its own.
    for option in options - {"causal", "parameters", "constants"} | {"non-causal", "parameter", "constant"}:
        assert f"--{option} " in text


def test_help_is_fast() -> None:
    heavy = "{'torch', 'sympy', 'triton', 'jinja2'}"
    result = python("-c", f"import sys; from mtagen.cli import app; print({heavy} & sys.modules.keys())")
    assert result.stdout.strip() == "set()", result.stderr


def test_module_runs_as_a_program() -> None:
    assert "Usage: mtagen" in python("-m", "mtagen", "--help").stdout
    result = python("-m", "mtagen", "plan", "--kernel", "6,11", "--head-dim", "127")
    assert result.returncode == 2
    assert result.stderr == "mtagen: head_dim: got 127; is not supported; legal: multiples of 8 from 16 to 256\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "6"], "kernel: got '6'"),
        (["--kernel", "6,11,1"], "kernel: got '6,11,1'"),
        (["--kernel", "six,eleven"], "kernel: got 'six,eleven'"),
        (["--kernel", "0,11"], "kernel: got (0, 11)"),
        (["--mixed-heads", "65"], "mixed_heads: got 65"),
        (["--post-kernel", "2;3"], "post_kernel: got '2;3'"),
        (["--post-kernel", "65,3"], "post_kernel: got (65, 3)"),
        (["--post-mixed-heads", "0"], "post_mixed_heads: got 0"),
        (["--head-dim", "127"], "head_dim: got 127"),
        (["--value-head-dim", "8"], "value_head_dim: got 8"),
        (["--key-padding", "top"], "key_padding: got 'top'"),
        (["--mask", "none"], "mask: got 'none'"),
        (["--dtype", "fp8"], "dtype: got 'fp8'"),
        (["--target", "h100"], "target: got 'h100'"),
        (["--backend", "cudnn"], "backend: got 'cudnn'"),
        (["--parameter", "t:h"], "parameter: got 't:h'"),
    ],
)
@pytest.mark.parametrize("command", ["emit", "plan", "check"])
def test_bad_selection_is_explained_in_one_line(
    command: str, arguments: list[str], message: str, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")] if command == "emit" else []
    result = run(command, *SELECTION, *arguments, *out)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"mtagen: {message}; ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "--kernel", "6,11"],
        ["plan", "--head-dim", "64"],
        ["plan", *SELECTION, "--head-dim", "many"],
        ["plan", *SELECTION, "--nonsense"],
        ["emit", *SELECTION],
        ["emit", *SELECTION, "--out", __file__],
        ["list", "extra"],
        ["collect-env", "--yaml"],
        ["nonsense"],
        [],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def imported(path: Path) -> set[str]:
    """The packages that a module imports, the standard library's aside."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or ".")
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names


def emitted(folder: Path, *options: str) -> dict[str, Path]:
    """What ``emit`` writes, by name; it says so line by line."""
    paths = [Path(line) for line in output("emit", *SELECTION, *options, "--out", folder).splitlines()]
    assert sorted(paths) == sorted(folder.iterdir())
    return {path.name: path for path in paths}


def test_emit_writes_a_module_of_triton_kernels(tmp_path: Path) -> None:
    ((name, path),) = emitted(tmp_path / "new" / "out", "--backend", "triton").items()
    assert name == f"mta_lift_{plan(Spec((6, 11), 64)).suffix}.py"
    assert imported(path) == {"torch", "triton"}


def test_emit_writes_cuda_sources_and_the_module_that_launches_them(tmp_path: Path) -> None:
    files = emitted(tmp_path, "--backend", "cuda")
    made = plan(Spec((6, 11), 64), "sm_90a", "cuda")
    assert files.keys() == {
        f"mta_tile_{part}{made.suffix}{end}"
        for part, end in (
            ("fwd_", ".cu"),
            ("fwd_split_", ".cu"),
            ("bwd_", ".cu"),
            ("decode_", ".cu"),
            ("", ".py"),
        )
    }
    host = files[f"mta_tile_{made.suffix}.py"]
    assert imported(host) == {"torch", "cuda"}
    facts = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(host.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("SOURCES", "KERNELS")
    }
    assert facts["SOURCES"] == {name: f"{one.name}.cu" for name, one in made.cuda.items()}
    for name, one in made.cuda.items():
        source = files[f"{one.name}.cu"].read_text()
        assert all(f"{kernel.name}(" in source for kernel in one.kernels)
        assert facts["KERNELS"][name] == {
            kernel.role: (kernel.name, kernel.threads, kernel.shared, codes(kernel)) for kernel in one.kernels
        }


def test_emit_writes_both_where_both_serve(tmp_path: Path) -> None:
    files = emitted(tmp_path, "--backend", "auto", "--value-head-dim", "256")
    made = plan(Spec((6, 11), 64, 256), "sm_90a")
    assert made.backend == "cuda+triton"
    assert sorted(files) == sorted(render(made).files)
    assert {Path(name).suffix for name in files} == {".cu", ".py"}


def test_plan_shows_the_cuda_passes() -> None:
    text = " ".join(output("plan", *SELECTION, "--backend", "cuda").split())
    for one in plan(Spec((6, 11), 64), "sm_90a", "cuda").tile.values():
        assert all(" ".join(value.split()) in text for _, _, value in one.rows_of_table())


def test_emit_reports_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("emit", *SELECTION, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("mtagen: ")


def test_plan_json_is_the_plan() -> None:
    options = ("--value-head-dim", "32", "--non-causal", "--key-padding", "left", "--dtype", "fp16")
    text = output("plan", *SELECTION, *options, "--target", "sm_80", "--json")
    spec = Spec((6, 11), 64, 32, causal=False, key_padding="left", dtype="fp16")
    assert Plan.from_json(text) == plan(spec, "sm_80")


def test_plan_of_a_pipeline() -> None:
    text = output("plan", *STAGES, "--head-dim", "64", "--target", "cpu", "--json")
    spec = Spec(None, 64, mixed_heads=4, post_kernel=(2, 3), post_mixed_heads=2)
    assert Plan.from_json(text) == plan(spec, "cpu")


def test_a_pipeline_that_a_backend_cannot_do() -> None:
    result = run("plan", *STAGES, "--head-dim", "64", "--backend", "cuda", "--dtype", "fp32")
    assert result.exit_code == 2
    assert result.stderr.startswith("mtagen: dtype: got 'fp32'; the cuda backend supports 16-bit dtypes only; legal: ")


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_plan_prints_every_row(backend: str) -> None:
    text = output("plan", *SELECTION, "--mask", "output", "--backend", backend)
    made = plan(Spec((6, 11), 64, mask="output"), "sm_90a", backend)
    assert made.name in text
    assert all(name in text for _, name, _ in made.table())


def test_list_shows_entries(cache: Cache) -> None:
    assert output("list") == f"0 in {cache.root}\n"
    fill(cache)
    text = output("list")
    assert all(part in text for part in ("mta_some", "sm_90a", "2.0 KiB", f"1 in {cache.root}"))


def test_show_config_shows_values(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_LOCK_TIMEOUT", "2.5")
    text = "".join(output("show-config").split())  # long paths are folded
    assert all(part in text for part in ("MTAGEN_CACHE_DIR", "MTAGEN_CACHE_LOCK_TIMEOUT", "2.5"))
    monkeypatch.setenv("MTAGEN_CACHE_LOCK_TIMEOUT", "soon")
    assert run("show-config").exit_code == 2


def test_collect_env(cache: Cache) -> None:
    facts = json.loads(output("collect-env", "--json"))
    assert {"triton", "cuda-core", "cuda-bindings", "nvrtc"} <= facts.keys()
    assert re.fullmatch(r"\d+\.\d+", facts["nvrtc"])
    assert facts["cache_dir"] == str(cache.root)
    text = output("collect-env")
    assert all(name in text for name in facts)


def test_clear_cache_asks_first(cache: Cache) -> None:
    fill(cache)
    assert run("clear-cache", answer="n\n").exit_code == 1
    assert len([*cache.entries()]) == 1
    assert "removed 1 (" in output("clear-cache", answer="y\n")
    assert not [*cache.entries()]


def test_clear_cache_yes(cache: Cache) -> None:
    fill(cache)
    assert "removed 1 (" in output("clear-cache", "--yes")
    assert output("clear-cache", "--yes") == f"removed 0 (0.0 KiB) from {cache.root}\n"


def test_check_passes_on_this_machine() -> None:
    text = output("check", *SMALL, "--dtype", "fp32", "--backend", "torch")
    assert "all 40 within the rule" in text
    assert "FAILED" not in text


def test_check_of_a_pipeline() -> None:
    text = output("check", *STAGES, "--head-dim", "16", "--device", "cpu", "--dtype", "fp32", "--backend", "torch")
    assert "all 50 within the rule" in text
    assert all(f"d{name} " in text for name in ("head_weight", "post_weight", "post_head_weight"))


def test_check_exits_with_1_on_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Sound(Spec((2, 3), 16), fault="dk")
    op.plan = SimpleNamespace(name="spoiled", backend="none", reason="a test")  # type: ignore[attr-defined]
    monkeypatch.setattr(mtagen, "build", lambda **_: op, raising=False)
    result = run("check", *SMALL)
    assert result.exit_code == 1
    assert "spoiled" in result.stdout
    assert "4 of 40 failed" in result.stdout  # all but that of the single key, which is 0


def test_check_refuses_what_it_cannot_judge() -> None:
    result = run("check", *SMALL, "--dtype", "fp64")
    assert result.exit_code == 2
    assert "fp64" in result.stderr
    result = run("check", *SMALL, "--device", "tpu")
    assert result.exit_code == 2
    assert result.stderr.startswith("mtagen: device: got 'tpu'")


def test_check_json() -> None:
    facts = json.loads(output("check", *SMALL, "--dtype", "fp32", "--backend", "torch", "--json"))
    assert (facts["backend"], facts["device"], facts["failed"], len(facts["rows"])) == ("torch", "cpu", 0, 40)
    first = facts["rows"][0]
    assert {"batch", "heads", "kv_heads", "nq", "nk", "result", "error", "eager_error", "allowed", "ok"} == first.keys()
    assert all(row["error"] <= row["allowed"] and row["ok"] for row in facts["rows"])


def test_check_json_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that JSON has no number for is null."""
    op = Sound(Spec((2, 3), 16), fault="dk")
    op.plan = SimpleNamespace(name="spoiled", backend="none", reason="a test")  # type: ignore[attr-defined]
    monkeypatch.setattr(mtagen, "build", lambda **_: op, raising=False)
    monkeypatch.setattr("mtagen.check.judge_decode", lambda *_: {"decode": Comparison(math.inf, 0.0, 1.0)})
    result = run("check", *SMALL, "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert {(row["error"], row["ok"]) for row in rows if row["result"] == "decode"} == {(None, False)}


@pytest.mark.parametrize("columns", ["30", "60"])
@pytest.mark.parametrize(
    "command", [("check", "--backend", "torch"), ("plan", "--target", "sm_90a")], ids=lambda x: x[0]
)
def test_narrow_terminals_break_no_figures(monkeypatch: pytest.MonkeyPatch, columns: str, command: tuple[str]) -> None:
    name, *options = command
    selection = SMALL if name == "check" else SMALL[:4]
    monkeypatch.setenv("COLUMNS", "200")
    wide = output(name, *selection, *options)
    monkeypatch.setenv("COLUMNS", columns)
    narrow = output(name, *selection, *options)
    figures = re.findall(r"[-+.\w]*\d[-+.\w]*", wide)
    assert len(figures) > 20
    assert {word for word in figures if len(word) < 16} <= {*re.findall(r"[-+.\w]+", narrow)}


@pytest.mark.parametrize("command", [("plan",), ("plan", "--json"), ("check", "--backend", "torch", "--device", "cpu")])
def test_a_reader_that_stops_early_gets_no_traceback(command: tuple[str, ...]) -> None:
    """As ``| head`` does. Output is unbuffered, so that what is written after the reader left fails at once."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "mtagen", command[0], *SMALL[:4], *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_tune_refuses_before_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("tune", *SELECTION)
    assert result.exit_code == 2
    assert result.stderr.startswith("mtagen: device: got 'cpu'; tuning times kernels on a GPU")


def test_commands_have_one_default_backend_and_target() -> None:
    commands = typer.main.get_group(app).commands
    defaults = {
        (name, option.name): option.default
        for name in ("emit", "plan", "check")
        for option in commands[name].params
        if option.name in ("backend", "target")
    }
    assert {default for (_, option), default in defaults.items() if option == "backend"} == {"auto"}
    assert defaults["emit", "target"] == defaults["plan", "target"] == "sm_90a"


def test_markup_of_texts_is_printed_as_it_is() -> None:
    console = Console(file=StringIO(), width=60)
    remedy = "pip install 'mtagen[bench]'"
    print_table(
        Table(f"title [bold] {remedy}", ["the [what]", "why"], [["[a]", remedy]], keys=1, notes=[remedy]), console
    )
    text = console.file.getvalue()
    assert text.count(remedy) == 3
    assert "[what]" in text
    assert "[a]" in text


def test_check_of_parameters_of_pairs() -> None:
    """Sizes with more queries than keys are left out: such queries have no entries."""
    options = ["--kernel", "none", "--head-dim", "16", "--logits", "s + t[b, h, i, j]", "--parameter", "t=b,h,i,j"]
    for more, results in (([], 32), (["--constant", "t"], 28)):
        result = run("check", *options, *more)
        assert result.exit_code == 0
        assert f"all {results} within the rule" in result.stdout
