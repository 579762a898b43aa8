"""The example: samples are the task's, the model generates what it computes, training learns and resumes exactly."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from examples.decoder import generate
from examples.find_block.__main__ import app
from examples.find_block.data import TEST_STREAM, Batches, Task
from examples.find_block.model import Size, make_decoder
from examples.find_block.plot import sketch
from examples.find_block.train import Settings, Trainer, train
from mtagen import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[1] / "examples/find_block/README.md"
CPU = torch.device("cpu")
SMALL = Task(letters=6, block_length=3, blocks=4)
SETTINGS = Settings(SMALL, Size(dim=32, layers=2, heads=2), batch=32, lr=5e-3, warmup=5, test_samples=20)


def samples(task: Task, count: int, seed: int = 0) -> torch.Tensor:
    return task.sample(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("task", "length"), [(Task(), 319), (SMALL, 21), (Task(5, 4, 20), 106), (Task(26, 2, 50), 154)]
)
def test_samples_are_the_tasks(task: Task, length: int) -> None:
    """Each rule of the task, read off the text of a sample; few letters make chance break the rules often."""
    for row in samples(task, 100):
        text = task.text(row)
        assert len(text) == length == task.length
        prompt, answer = text[: task.prompt_length], text[task.prompt_length :]
        context, pair = prompt.split("#")
        blocks = context.split(".")
        assert len(blocks) == len(set(blocks)) == task.blocks
        assert all(len(block) == len(set(block)) == task.block_length for block in blocks)
        assert len(set(pair)) == 2
        assert [block for block in blocks if set(pair) <= set(block)] == [answer]


def test_samples_are_drawn_evenly() -> None:
    """Places of the answer, letters of it, and places of the pair in it, each within five standard deviations."""
    count, task = 20_000, Task(8, 4, 5)
    rows = samples(task, count)
    blocks = rows[:, : task.prompt_length - 2].view(count, task.blocks, -1)[:, :, :-1]
    pair, answer = rows[:, task.prompt_length - 2 : task.prompt_length], rows[:, task.prompt_length :]
    place = (blocks == answer.unsqueeze(1)).all(2).int().argmax(1)
    within = (answer.unsqueeze(1) == pair.unsqueeze(2)).int().argmax(2)
    for drawn, choices in ((place, task.blocks), (answer[:, 0], task.letters), (within @ torch.tensor([4, 1]), 12)):
        counts = drawn.unique(return_counts=True)[1].double()
        expected = count / choices
        assert len(counts) == choices
        assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_batches_are_by_number() -> None:
    batches = Batches(SMALL, 4, stream=0)
    assert torch.equal(batches[3], Batches(SMALL, 4, stream=0)[3])
    assert not torch.equal(batches[3], batches[4])
    assert not torch.equal(batches[3], Batches(SMALL, 4, TEST_STREAM)[3])
    fixed = Batches(SMALL, 4, stream=0, samples=11)
    assert len(fixed) == 2
    assert torch.equal(fixed[5], batches[1])


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: Task(letters=27), "letters"),
        (lambda: Task(letters=4), "block_length"),
        (lambda: Task(5, 5, 2), "blocks"),
        (lambda: Batches(SMALL, 4, 256), "stream"),
        (lambda: Batches(SMALL, 4, 0, samples=3), "samples"),
        (lambda: Settings(seed=255), "seed"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any, name: str) -> None:
    with pytest.raises(InputError, match=name):
        wrong()


def test_models_start_as_the_same_function() -> None:
    tokens = samples(SMALL, 3)
    outputs = []
    for kernel in (None, (2, 9)):
        torch.manual_seed(0)
        outputs.append(make_decoder(SMALL.vocabulary, Size(dim=32), kernel, CPU).eval()(tokens))
    torch.testing.assert_close(*outputs)


def test_size_of_the_papers_model() -> None:
    model = make_decoder(28, Size(), (2, 9), CPU)
    layer = 4 * 256 * 256 + 3 * 256 * 768 + 2 * 256 + 2 * 2 * 9
    assert sum(x.numel() for x in model.parameters()) == 28 * 256 + 4 * layer + 256


@pytest.mark.parametrize("kernel", [None, (2, 9)])
def test_generation_is_the_full_pass(kernel: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    model = make_decoder(SMALL.vocabulary, Size(dim=32), kernel, CPU).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that convolutions reach other tokens
    tokens = samples(SMALL, 50)[:, : SMALL.prompt_length]
    generated = torch.cat([*generate(model, tokens, 5)], 1)
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(2)], 1)
    assert torch.equal(generated, tokens[:, -5:])
    assert len(generated.unique()) > 2


def test_error_counts_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(SETTINGS, CPU)
    test = Batches(SMALL, 20, TEST_STREAM)[0]
    generated = test[:, SMALL.prompt_length :].clone()
    generated[:5, 2] += 1
    generated[0] += 1
    monkeypatch.setattr("examples.find_block.train.generate", lambda *_: iter(generated.split(1, 1)))
    assert trainer.error() == 0.25
    assert trainer.model.training


def test_loss_falls(tmp_path: Path) -> None:
    """In a few seconds more is learnt than which letters there are."""
    settings = replace(SETTINGS, size=replace(SETTINGS.size, dropout=0.0))
    train(settings, tmp_path, 60, device=CPU, evaluate_every=20)
    losses = [entry["loss"] for entry in read(tmp_path)[1:]]
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < 0.97 * math.log(SMALL.letters)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kernel", [None, (2, 9)])
def test_resumed_run_is_the_same(tmp_path: Path, kernel: tuple[int, int] | None) -> None:
    """Bit by bit, with dropout, samples that come again, and a log that went on after the checkpoint."""
    settings = replace(SETTINGS, kernel=kernel, samples=100)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings, whole, 6, device=CPU, evaluate_every=2)
    train(settings, parts, 4, device=CPU, evaluate_every=2)
    with (parts / "log.jsonl").open("a") as log:
        log.write('{"steps": 5, "loss": 0, "error": 0, "seconds": 0}\n')
    train(settings, parts, 6, device=CPU, evaluate_every=2, resume=True)
    logs = [[entry | {"seconds": None} for entry in read(folder)] for folder in (whole, parts)]
    assert logs[0] == logs[1]
    assert [entry["steps"] for entry in logs[0][1:]] == [2, 4, 6]
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, parts)]
    assert states[0]["steps"] == 6
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name


def test_other_settings_are_refused(tmp_path: Path) -> None:
    train(SETTINGS, tmp_path, 1, device=CPU)
    with pytest.raises(InputError, match="another run"):
        train(SETTINGS, tmp_path, 1, device=CPU)
    with pytest.raises(
        InputError, match=r"got {'lr': 1\.0}; .* was written by a run with other settings; legal: {'lr': 0\.005}"
    ):
        train(replace(SETTINGS, lr=1.0), tmp_path, 2, device=CPU, resume=True)


def test_cuda_graph_needs_a_gpu() -> None:
    with pytest.raises(InputError, match="needs a GPU"):
        Trainer(SETTINGS, CPU, cuda_graph=True)


ON_GPU = replace(SETTINGS, size=Size(dim=128, layers=2, heads=2, dropout=0.0), lr=1e-3)


@pytest.mark.gpu
def test_steps_of_a_cuda_graph_are_the_same(tmp_path: Path) -> None:
    """Losses of steps with and without, and of a run that goes on with a graph after steps without.

    Sums on a GPU are not the same bits from run to run; losses of other batches and weights differ by far more.
    """
    gpu = torch.device("cuda")
    losses = []
    for i, parts in enumerate([[(8, False)], [(8, True)], [(2, False), (8, True)]]):
        for steps, graph in parts:
            train(ON_GPU, tmp_path / str(i), steps, device=gpu, evaluate_every=1, cuda_graph=graph, resume=True)
        losses.append([entry["loss"] for entry in read(tmp_path / str(i))[1:]])
    assert max(losses[0]) - min(losses[0]) > 0.1
    assert losses[1] == pytest.approx(losses[0], abs=0.005)
    assert losses[2] == pytest.approx(losses[0], abs=0.005)


@pytest.mark.gpu
def test_cuda_graph_drops_anew() -> None:
    """Each launch of a graph draws what dropout keeps, so that losses of the same weights and batch differ."""
    settings = replace(ON_GPU, lr=0.0, size=replace(ON_GPU.size, dropout=0.5))
    trainer = Trainer(settings, torch.device("cuda"), cuda_graph=True)
    losses = [trainer.step(samples(SMALL, 32)).item() for _ in range(10)]
    assert len(set(losses)) == 10


SCHEDULES = [  # what the page calls them and their logs, other runs of plain attention, and how many seeds they have
    ("paper", "paper", "paper-longer", 5),
    ("lr 3e-4", "fast", "longer", 5),
    ("batch 256", "large", None, 2),
]


def entries(name: str) -> dict[int, float]:
    """A log's errors after so many steps."""
    lines = (PAGE.parent / "results" / f"{name}.jsonl").read_text().splitlines()[1:]
    return {entry["steps"]: entry["error"] for entry in map(json.loads, lines)}


@pytest.mark.parametrize(("schedule", "name", "again", "seeds"), SCHEDULES)
def test_means_on_the_page(schedule: str, name: str, again: str | None, seeds: int) -> None:
    """What it says of the mean over runs is what their logs say."""

    def runs(pattern: str) -> list[dict[int, float]]:
        return [entries(log.stem) for log in sorted((PAGE.parent / "results").glob(f"{pattern}.jsonl"))]

    def mean(of: list[dict[int, float]], steps: int) -> float:
        """Runs that were stopped before are without errors."""
        return sum(run.get(steps, 0) for run in of) / len(of)

    ours, others = runs(f"{name}-mta-*"), runs(f"{name}-plain-*")
    assert len(ours) == seeds
    if again:
        others += runs(f"{again}-plain-*")
    reached = min(steps for steps in set.intersection(*map(set, ours)) if mean(ours, steps) <= 0.02)
    assert all(reached in run for run in others)
    last = max(steps for run in others for steps in run if mean(others, steps) > 0.02)
    row = f"| {schedule} | {len(ours)}, {len(others)} | {reached:,} steps: {mean(ours, reached):.1%} | "
    row += f"{mean(others, reached):.1%} | {last:,} steps: at least {mean(others, last):.1%} |"
    assert row.replace("%", " %") in PAGE.read_text()


def after(errors: dict[int, float], error: float) -> int | None:
    """The steps after which a run first made at most this error."""
    return next((steps for steps in errors if errors[steps] <= error), None)


@pytest.mark.parametrize(("schedule", "name", "again", "seeds"), SCHEDULES)
def test_runs_on_the_page(schedule: str, name: str, again: str | None, seeds: int) -> None:
    """Each row of the table of runs."""

    def cells(log: str) -> str:
        errors = entries(log)
        found = [f"{steps:,}" if (steps := after(errors, error)) else "not yet" for error in (0.1, 0.02)]
        last = max(errors)
        return f"{found[0]} | {found[1]} | {last:,}, {100 * errors[last]:.1f} %"

    page, results = PAGE.read_text(), PAGE.parent / "results"
    for seed in range(seeds):
        first = f"{name}-plain-{seed}"
        plain = first if (results / f"{first}.jsonl").exists() else f"{again}-plain-{seed}"
        assert f"| {schedule}, {seed} | {cells(plain)} | {cells(f'{name}-mta-{seed}')} |" in page
        if plain == first and (results / f"{again}-plain-{seed}.jsonl").exists():
            assert f"| {schedule}, {seed} again | {cells(f'{again}-plain-{seed}')} | | | |" in page


def test_medians_on_the_page() -> None:
    """At three times the learning rate: how many steps it takes to 2 percent, with runs that were stopped before."""
    page = " ".join(PAGE.read_text().split())
    ours = sorted(steps for seed in range(5) if (steps := after(entries(f"fast-mta-{seed}"), 0.02)))
    least, middle, most = ours[0], ours[2], ours[4]
    assert f"MTA is at 2 % after {middle:,} steps ({least:,} to {most:,})" in page
    others = [entries(f"fast-plain-{seed}") for seed in range(5)] + [entries(f"longer-plain-{seed}") for seed in (0, 1)]
    (there,) = [steps for errors in others if (steps := after(errors, 0.02))]
    without = sorted(max(errors) for errors in others if not after(errors, 0.02))
    assert f"one was there after {there:,}. Two were stopped at {without[0]:,}" in page
    assert without[0] == without[1]
    bound = without[2]  # even if one was there and two had been soon after they were stopped, four of seven were not
    assert f"not there after {bound:,} steps" in page
    assert f"The other four were not there after {bound:,}" in page
    assert f"less than {math.ceil(100 * middle / bound) / 100} of the steps" in page


def test_sketch(tmp_path: Path) -> None:
    """Marks stand where the errors are, on lines between evaluations."""
    logs = []
    for name, kernel, errors in (("plain", None, (1.0, 1.0)), ("mta", [2, 5], (1.0, 0.0))):
        lines: list[dict[str, Any]] = [{"settings": {"kernel": kernel, "seed": 0}}]
        lines += [{"steps": steps, "error": error} for steps, error in zip((0, 1000), errors, strict=True)]
        logs.append(tmp_path / name)
        logs[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    head, *drawn, _, steps, names = sketch(logs, width=10, height=11).splitlines()
    assert head == "blocks not found"
    assert drawn[0] == " 100 % |oooooooooo"
    assert drawn[1:] == [f"{100 - 10 * line:4} % |{' ' * (line - 1)}*" for line in range(1, 11)]
    assert steps.endswith(" 1,000 steps")
    assert names == "o plain attention   * multi-token attention 2 x 5"


def test_commands(tmp_path: Path) -> None:
    """Both models of the demonstration, and a picture of their logs; a model by ``train`` that one of them equals."""
    runner = CliRunner()
    shown = runner.invoke(app, ["demo", str(tmp_path), "--steps", "1"])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"plain attention: step 1 of 1, loss \d\.\d+, error 100\.0%, \d+ s\n", shown.stdout)
    assert "o plain attention   * multi-token attention 2 x 5" in shown.stdout
    assert (tmp_path / "error.png").stat().st_size > 1000
    again = runner.invoke(app, ["demo", str(tmp_path), "--steps", "1"])
    assert again.exit_code == 0, again.output
    assert again.stdout.count("already finished") == 2
    assert "o plain attention" in again.stdout
    missing = runner.invoke(app, ["plot", str(tmp_path / "nowhere"), "--out", str(tmp_path / "none.png")])
    assert missing.exit_code == 2
    assert re.fullmatch(r"find_block: log: got '.*nowhere'; does not exist; legal: .*\n", missing.stderr)
    picture = tmp_path / "error.svg"
    logs = [str(tmp_path / name) for name in ("plain", "mta")]
    assert runner.invoke(app, ["plot", *logs, "--out", str(picture)]).exit_code == 0
    assert "multi-token attention 2 x" in picture.read_text()
    small = [
        "--letters",
        "6",
        "--block-length",
        "3",
        "--blocks",
        "4",
        "--dim",
        "32",
        "--layers",
        "1",
        "--device",
        "cpu",
    ]
    arguments = ["train", str(tmp_path / "own"), *small, "--steps", "2", "--test-samples", "10", "--workers", "0"]
    assert runner.invoke(app, [*arguments, "--kernel", "none"]).exit_code == 0
    header = read(tmp_path / "own")[0]["settings"]
    assert header["kernel"] is None
    assert header["task"] == {"letters": 6, "block_length": 3, "blocks": 4}
    nowhere = runner.invoke(app, [*arguments, "--device", "cuda:99"])
    assert nowhere.exit_code == 2
    assert "cuda:99 is none of cpu" in nowhere.output
    wrong = runner.invoke(app, [*arguments, "--kernel", "2"])
    assert wrong.exit_code == 2
    assert "CQ,CK" in wrong.output
