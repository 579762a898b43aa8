"""The decoder trained over several processes by torchrun is the one that one process trains."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kills import resumed_after_kills
from torchrun import torchrun

from examples.gpt import longest, train
from examples.gpt.train_distributed import METADATA, DistributedRun, remove
from mtagen import InputError

SETTINGS = train.Settings(steps=6, batch=4, length=64, lr=3e-3, warmup=2)
OPTIONS = ["--steps", "6", "--batch", "4", "--length", "64", "--lr", "3e-3", "--warmup", "2", "--log-every", "1"]
FAILS = """\
import os, typer
from examples.gpt import train_distributed
step = train_distributed.DistributedRun.take_step

def fails(run):
    if os.environ["RANK"] == "1" and run.step == 2:
        raise RuntimeError("this rank is out of order")
    return step(run)

train_distributed.DistributedRun.take_step = fails
typer.run(train_distributed.main)
"""
INTERRUPTED = """\
import os, signal, typer
from examples.gpt import train_distributed
step = train_distributed.DistributedRun.take_step

def interrupted(run):
    if os.environ["RANK"] == "1" and run.step == 2:
        signal.raise_signal(signal.SIGINT)
    return step(run)

train_distributed.DistributedRun.take_step = interrupted
typer.run(train_distributed.main)
"""
COMPILES = """\
import functools, torch, typer
from examples.gpt import train_distributed

torch.compile = functools.partial(torch.compile, backend="aot_eager")  # the default one takes a minute
typer.run(train_distributed.main)
"""


def trained(folder: Path, ranks: int, *arguments: Any) -> None:
    done = torchrun(ranks, "-m", "examples.gpt.train_distributed", folder, *OPTIONS, *arguments)
    assert done.returncode == 0, done.stderr


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines()[1:])
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process, by steps."""
    folder = tmp_path_factory.mktemp("alone")
    train.Run(SETTINGS, folder, device="cpu").train(log_every=1)
    return losses(folder)


def test_sequences_over_ranks_and_a_checkpoint_for_another_number(alone: dict[int, float], tmp_path: Path) -> None:
    trained(tmp_path, 2, "--until", 3)
    trained(tmp_path, 1, "--resume")
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000006"]


def test_batches_over_ranks(alone: dict[int, float], tmp_path: Path) -> None:
    """A checkpoint that is not complete is not gone on from."""
    (tmp_path / "checkpoints/00000005").mkdir(parents=True)
    trained(tmp_path, 2, "--context", 1, "--resume")
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.fixture
def one_rank() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


SHORT = train.Settings(steps=2, batch=2, length=16, lr=3e-3, warmup=2)


def train_short(folder: Path) -> None:
    """On one rank, with a checkpoint after each step."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    DistributedRun(SHORT, folder, context=1, resume=True).train(log_every=1, save_every=1)
    dist.destroy_process_group()


def test_a_kill_at_any_moment_leaves_a_run_to_resume(tmp_path: Path) -> None:
    """At every third one, as each takes a while; the log is as if it had not been killed."""
    step = 3
    moments = resumed_after_kills(train_short, tmp_path, step)
    assert moments > 30
    for name in ("whole", *range(1, moments, step)):
        folder = tmp_path / str(name)
        assert losses(folder) == losses(tmp_path / "whole")
        left = {path.name for path in folder.glob("checkpoints/*")}
        assert {"00000002"} <= left <= {"00000001", "00000002"}  # the one before, if the kill came as it was removed


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_are_written_beside_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is complete before it gets its name, and the one before is there until then."""
    named: list[tuple[str, list[str]]] = []
    replace = Path.replace

    def watched(path: Path, target: Path) -> Path:
        if path.parent.name == "checkpoints":
            assert (path / METADATA).exists()
            named.append((target.name, sorted(each.name for each in path.parent.iterdir() if each != path)))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    run = DistributedRun(SETTINGS, tmp_path, context=1)
    run.train(until=4, save_every=2)
    assert named == [("00000000", []), ("00000002", ["00000000"]), ("00000004", ["00000002"])]
    run.save()
    assert len(named) == 3


@pytest.mark.usefixtures("one_rank")
def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    DistributedRun(SHORT, tmp_path, context=1).train(save_every=1)
    with pytest.raises(InputError, match="was written by a run with other settings"):
        DistributedRun(train.Settings(size="small", steps=2, batch=2, length=16), tmp_path, context=1, resume=True)
    checkpoint = tmp_path / "checkpoints/00000002"
    for name in ("__0_0.distcp", METADATA):
        (checkpoint / name).write_bytes(b"")
        with pytest.raises(InputError, match=f"{checkpoint}: got .*; cannot be read as a checkpoint; legal: "):
            DistributedRun(SHORT, tmp_path, context=1, resume=True)


def test_ctrl_c_saves_the_step(alone: dict[int, float], tmp_path: Path) -> None:
    """The same one on both ranks, though it reached one. One rank says how to go on."""
    folder, script = tmp_path / "run", tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = torchrun(2, script, folder, *OPTIONS)
    assert done.returncode == 1
    (checkpoint,) = folder.glob("checkpoints/*")
    assert checkpoint.name == "00000003"
    assert done.stderr.count(f"stopped after step 3, saved to {checkpoint}: run the same command with --resume") == 1
    trained(folder, 2, "--resume")
    assert losses(folder) == pytest.approx(alone, rel=1e-5)


def test_a_checkpoint_that_is_being_removed_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kill leaves of it."""
    (tmp_path / METADATA).touch()
    (tmp_path / "__0_0.distcp").touch()
    monkeypatch.setattr("shutil.rmtree", lambda path: None)
    remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["__0_0.distcp"]


def test_compiled(alone: dict[int, float], tmp_path: Path) -> None:
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    done = torchrun(2, script, tmp_path, *OPTIONS, "--until", 2, "--compile")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx({step: alone[step] for step in (1, 2)}, rel=1e-5)


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    start = time.monotonic()
    done = torchrun(2, script, tmp_path / "run", *OPTIONS)
    assert done.returncode == 1
    assert "this rank is out of order" in done.stderr
    assert time.monotonic() - start < 60


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "examples.gpt.train_distributed", tmp_path, *OPTIONS, "--length", 66)
    assert done.returncode == 1
    assert (
        "batch, length: got (4, 66); batch must divide evenly among the groups of ranks, and length into 4 equal chunks"
        in done.stderr
    )


def test_steps_on_longer_and_longer_sequences(tmp_path: Path) -> None:
    path = tmp_path / "longest.json"
    options = ["--size", "tiny", "--length", 64, "--length", 128, "--json", path]
    done = torchrun(2, "-m", "examples.gpt.longest", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["ranks"] == 2
    assert [result["length"] for result in report["results"]] == [64, 128]
    for result in report["results"]:
        assert result["loss"] == pytest.approx(math.log(256), rel=0.2)  # before it learns, of bytes
        assert result["seconds"] > 0


def test_a_length_that_fills_memory() -> None:
    """By a straight line, rounded down."""
    results = [{"length": length, "peak_gib": gib} for length, gib in ((10, 50.0), (100, 3.0), (200, 5.0))]
    assert longest.filling(results, 11.06, 4) == 500
