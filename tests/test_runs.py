"""Runs of the examples lose nothing: kills, Ctrl-C, damaged files, and what is there already."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import pytest
import torch
import typer
from kills import resumed_after_kills
from typer.testing import CliRunner

from examples import runs
from examples.find_block import train as find_block
from examples.find_block.__main__ import app
from examples.find_block.data import Task
from examples.find_block.model import Size
from examples.find_block.plot import plot
from examples.gpt import generate
from examples.gpt import train as gpt
from mtagen import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
BLOCKS = find_block.Settings(
    Task(letters=6, block_length=3, blocks=4), Size(32, 1, 2, 0.1), batch=8, warmup=2, test_samples=10
)
TEXTS = gpt.Settings(steps=4, batch=2, length=16, lr=3e-3, warmup=2)


def train_blocks(folder: Path, resume: bool = True, until: int = 4) -> None:
    """Evaluates, and so logs and saves, after every second step."""
    find_block.train(BLOCKS, folder, until, device=torch.device("cpu"), evaluate_every=2, resume=resume)


def train_texts(folder: Path, resume: bool = True, until: int = 4) -> None:
    gpt.Run(TEXTS, folder, device="cpu", resume=resume).train(until, log_every=1, save_every=2)


class Program(NamedTuple):
    """One that trains.

    Attributes:
        train: trains in a folder.
        owner: the class that takes a step.
        step: the method.
    """

    train: Callable[..., None]
    owner: type
    step: str


PROGRAMS = {
    "find_block": Program(train_blocks, find_block.Trainer, "step"),
    "gpt": Program(train_texts, gpt.Run, "take_step"),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def log(folder: Path) -> list[dict[str, Any]]:
    """Entries without what depends on the clock."""
    entries = map(json.loads, (folder / runs.LOG).read_text().splitlines())
    return [
        {name: value for name, value in entry.items() if name not in ("seconds", "tokens_per_s")} for entry in entries
    ]


def check_same(folder: Path, whole: Path) -> None:
    """Equal logs, and equal weights to the last bit."""
    assert log(folder) == log(whole)
    models = [torch.load(each / runs.CHECKPOINT, weights_only=True)["model"] for each in (folder, whole)]
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def test_a_kill_at_any_moment_leaves_a_run_to_resume(tmp_path: Path, program: Program) -> None:
    """As if it had not been killed; nothing unfinished is left beside it."""
    moments = resumed_after_kills(program.train, tmp_path)
    assert moments > 20
    for moment in range(1, moments + 1):
        check_same(tmp_path / str(moment), tmp_path / "whole")
        assert {*content(tmp_path / str(moment))} == {runs.LOG, runs.CHECKPOINT}


def test_ctrl_c_saves_the_step(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two checkpoints; the run that goes on is the same, with means over steps before and after."""
    program.train(tmp_path / "whole")
    take_step, calls = getattr(program.owner, program.step), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return take_step(*arguments)

    monkeypatch.setattr(program.owner, program.step, interrupted)
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt, match=rf"stopped after step 3, saved to {folder}.*--resume to continue"):
        program.train(folder)
    assert len(calls) == 3
    state = torch.load(folder / runs.CHECKPOINT, weights_only=True)
    assert state.get("step", state.get("steps")) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    program.train(folder)
    check_same(folder, tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once() -> None:
    with runs.Interrupt(quiet=True) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """It reaches the processes that draw samples, too. One line says how to go on."""
    options = ["--steps", "100000", "--batch", "2", "--blocks", "4", "--dim", "32", "--layers", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "examples.find_block", "train", tmp_path, *options, "--evaluate-every", "1"]
    command += ["--test-samples", "1", "--workers", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        deadline = monotonic() + 120
        while not (tmp_path / runs.LOG).exists() or len(log(tmp_path)) < 2:
            assert process.poll() is None, process.stderr.read()
            assert monotonic() < deadline
            sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert f"saved to {tmp_path / runs.CHECKPOINT}: run the same command with --resume to continue" in errors
    assert errors.count("stopping after this step") == 1
    assert "Traceback" not in errors


def test_a_finished_run_says_so(tmp_path: Path, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program.train(tmp_path)
    before = content(tmp_path)
    capsys.readouterr()
    program.train(tmp_path)
    shown = "".join(capsys.readouterr())
    assert "already finished" in shown
    assert "nan" not in shown
    assert content(tmp_path) == before


def test_a_log_without_a_checkpoint_is_not_touched(tmp_path: Path, program: Program) -> None:
    program.train(tmp_path)
    (tmp_path / runs.CHECKPOINT).unlink()
    before = content(tmp_path)
    for resume, rule in ((True, "has a log and no checkpoint to resume from"), (False, "has a log of another run")):
        with pytest.raises(InputError, match=rule):
            program.train(tmp_path, resume=resume)
    assert content(tmp_path) == before


def test_a_checkpoint_without_a_log_is_not_overwritten(tmp_path: Path, program: Program) -> None:
    program.train(tmp_path)
    (tmp_path / runs.LOG).unlink()
    before = content(tmp_path)
    for resume, rule in ((True, "has a checkpoint and no log"), (False, "has a checkpoint of another run")):
        with pytest.raises(InputError, match=rule):
            program.train(tmp_path, resume=resume)
    assert content(tmp_path) == before


def emptied(whole: bytes) -> bytes:
    return b""


def torn(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def overwritten(whole: bytes) -> bytes:
    """A few bytes of a tensor, so that only the archive's checksums tell."""
    middle = len(whole) // 2
    return whole[:middle] + bytes(byte ^ 255 for byte in whole[middle : middle + 8]) + whole[middle + 8 :]


def text(whole: bytes) -> bytes:
    return b"no checkpoint"


@pytest.mark.parametrize("damage", [emptied, torn, overwritten, text])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, program: Program, damage: Callable[[bytes], bytes]) -> None:
    program.train(tmp_path, until=2)
    checkpoint = tmp_path / runs.CHECKPOINT
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    before = content(tmp_path)
    with pytest.raises(
        InputError, match=rf"^{checkpoint}: got .*; cannot be read as a checkpoint; legal: an undamaged copy"
    ):
        program.train(tmp_path)
    assert content(tmp_path) == before


class Attack:
    """What a pickle can make its reader do."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, program: Program) -> None:
    """As the page on security says."""
    run, made = tmp_path / "run", tmp_path / "made"
    program.train(run, until=2)
    torch.save({"settings": Attack(made)}, run / runs.CHECKPOINT)
    with pytest.raises(InputError, match="cannot be read as a checkpoint"):
        program.train(run)
    assert not made.exists()


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/distributed.md", "examples/gpt/README.md"])
def test_pages_say_what_is_executed(page: str) -> None:
    """The one kind of checkpoint that is not safe to read."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(r"--resume`.*`\.metadata`", text, flags=re.DOTALL)


def test_another_file_is_no_checkpoint(tmp_path: Path, program: Program) -> None:
    program.train(tmp_path, until=2)
    for other, found in (({"weights": 1}, r"\['weights'\]"), ([1], "'list'")):
        torch.save(other, tmp_path / runs.CHECKPOINT)
        with pytest.raises(
            InputError, match=f"got {found}; is no checkpoint of this program; legal: a checkpoint with settings"
        ):
            program.train(tmp_path)


@pytest.mark.parametrize("line", ['{"step": 1, "st', "", "[1]", '{"step": "1", "steps": "1"}', "[" * 10**5, "\xff"])
def test_a_damaged_log_is_named(tmp_path: Path, program: Program, line: str) -> None:
    """A half line in the midst of others is of no kill, and nothing is dropped for it."""
    program.train(tmp_path, until=2)
    path = tmp_path / runs.LOG
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line.encode("latin1") + b"\n" + b"".join(lines[1:]))
    before = content(tmp_path)
    with pytest.raises(InputError, match=rf"^{path}, line 2: got .*; is no entry of a log; legal: a JSON object"):
        program.train(tmp_path)
    assert content(tmp_path) == before


def test_a_torn_last_line_is_left_out(tmp_path: Path, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """As a kill leaves it after the last checkpoint."""
    program.train(tmp_path / "whole")
    program.train(tmp_path / "parts", until=2)
    path = tmp_path / "parts" / runs.LOG
    number = len(path.read_bytes().splitlines()) + 1
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    program.train(tmp_path / "parts")
    assert f"{path}: line {number} is incomplete, and was left out" in capsys.readouterr().err
    check_same(tmp_path / "parts", tmp_path / "whole")


def test_a_line_without_its_end_is_kept(tmp_path: Path) -> None:
    """As editors leave the last one."""
    path = tmp_path / runs.LOG
    path.write_text('{"step": 1}\n{"step": 2}')
    written = runs.Log(path, "step")
    assert written.continue_at(2) == [{"step": 1}, {"step": 2}]
    written.append({"step": 3})
    assert [entry["step"] for entry in written.entries()] == [1, 2, 3]


def test_plots_name_damaged_logs(tmp_path: Path) -> None:
    path = tmp_path / runs.LOG
    for lines, rule in (
        (None, "does not exist"),
        ("", "holds no evaluation of a run"),
        ('{"settings": {}}\n', "holds no evaluation of a run"),
        ('{"settings": {}}\n{"steps": 1}\n', "holds no evaluation of a run"),
        ('{"settings": {}}\n{"st\n', "line 2: .* is no entry of a log"),
    ):
        if lines is not None:
            path.write_text(lines)
        with pytest.raises(InputError, match=rule):
            plot([path], tmp_path / "error.svg")


def test_errors_are_one_line(tmp_path: Path) -> None:
    """Of all programs that read a checkpoint."""
    checkpoint = tmp_path / "plain" / runs.CHECKPOINT
    checkpoint.parent.mkdir()
    checkpoint.touch()
    programs = typer.Typer()
    programs.command("train")(gpt.main)
    programs.command("generate")(generate.main)
    for name, shown in (
        ("find_block", CliRunner().invoke(app, ["demo", str(tmp_path)])),
        ("train", CliRunner().invoke(programs, ["train", str(checkpoint.parent), "--resume"])),
        ("generate", CliRunner().invoke(programs, ["generate", str(checkpoint.parent)])),
    ):
        assert shown.exit_code == 2
        assert shown.stderr == f"{name}: {runs.unreadable(checkpoint, EOFError('the file is empty'))}\n"


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (9, 1), (300, 30), (10_000, 1000), (100_000, 1000)])
def test_default_interval(steps: int, interval: int) -> None:
    assert runs.default_interval(steps) == interval


def test_steps_that_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last, and by default every tenth part of a run between them, each of them once."""
    saved: list[int] = []
    publish = runs.publish

    def counting(path: Path, write: Any) -> None:
        publish(path, write)
        if path.name == runs.CHECKPOINT:
            state = torch.load(path, weights_only=True)
            saved.append(state.get("step", state.get("steps")))

    monkeypatch.setattr(gpt, "publish", counting)
    monkeypatch.setattr(find_block, "publish", counting)
    gpt.Run(replace(TEXTS, steps=20), tmp_path / "gpt", device="cpu").train()
    assert saved == [*range(0, 21, 2)]
    saved.clear()
    find_block.train(BLOCKS, tmp_path / "blocks", 20, device=torch.device("cpu"))
    assert saved == [*range(0, 21, 2)]
    saved.clear()
    gpt.Run(TEXTS, tmp_path / "last", device="cpu").train(save_every=3)
    assert saved == [0, 3, 4]


def raising(error: BaseException | type[BaseException]) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise error

    return fails


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    monkeypatch.setattr(os, failing, raising(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        runs.publish_json(path, {})
    assert content(tmp_path) == {"file": b"before"}


def test_a_log_is_cut_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / runs.LOG
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    written = runs.Log(path, "step")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", raising(InterruptedError))
        with pytest.raises(InterruptedError):
            written.continue_at(1)
    assert [entry["step"] for entry in written.entries()] == [1, 2]
    assert written.continue_at(1) == written.entries() == [{"step": 1}]
