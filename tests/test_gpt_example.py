"""The example of a decoder: its sizes, that training resumes as if it had not stopped, and that it generates."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from examples.decoder import Decoder
from examples.gpt import compare, corpus, longest, plot, throughput, train, train_distributed
from examples.gpt import generate as generation
from examples.gpt.model import (
    ATTENTION,
    LLAMA3_VOCABULARY,
    SIZES,
    Size,
    count_parameters,
    make_decoder,
    next_token_loss,
)
from mtagen.nn import MultiTokenAttention

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = train.Settings(steps=6, batch=2, length=32, lr=3e-3, warmup=2)
COUNTS = {"300M": 388_300_628, "550M": 651_837_128, "830M": 876_583_320, "1B": 1_495_925_144}
ROUNDING = {"mta": 1e-10, "talking-heads": 1e-10, "plain": 1e-10, "authors": 1e-4}  # relative; theirs has fp32 in it
README = (Path(train.__file__).with_name("README.md")).read_text(encoding="utf-8")


def model(variant: str, **options: Any) -> Decoder:
    """A small one in float64, whose stages are no longer the identity."""
    torch.manual_seed(0)
    made = make_decoder(Size(32, 3, 2), variant, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


def run(main: Any, *arguments: object) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", COUNTS)
def test_sizes(name: str) -> None:
    """Parameters as the README lists them, the larger part of which are those of the layers."""
    with torch.device("meta"):
        made = make_decoder(SIZES[name], vocabulary=LLAMA3_VOCABULARY)
    assert count_parameters(made) == COUNTS[name]
    assert f"{COUNTS[name]:,}" in README
    assert f"{COUNTS[name] - made.tok_embeddings.weight.numel():,}" in README
    convolved = [i for i, block in enumerate(made.layers) if block.attention.mta_kernel is not None]
    assert convolved == [2, 6, 10, 14, 18, 22][: 5 if name == "300M" else 6]
    for block in made.layers:
        assert block.attention.wpsm.weight.shape == block.attention.wposm.weight.shape == 2 * (SIZES[name].heads,)
        assert block.attention.subln is not None
        assert block.attention.gate.weight.shape == (1, SIZES[name].dim // SIZES[name].heads)


def test_layers_of_variants() -> None:
    """Talking heads mix and do nothing else; plain attention has projections alone."""
    projections = {"wq.weight", "wk.weight", "wv.weight", "wo.weight"}
    for variant, more in (("plain", set()), ("talking-heads", {"wpsm.weight", "wposm.weight"})):
        for block in model(variant).layers:
            assert set(block.attention.state_dict()) == projections | more


def test_authors_attention_is_mtagens() -> None:
    """Their order of operations gives the same outputs and gradients, by the rounding of their fp32 softmax."""
    theirs, ours = model("authors"), model("mta")
    ours.load_state_dict(theirs.state_dict())
    check_alike(ours, theirs, ROUNDING["authors"])


def test_plain_attention_is_mtagens() -> None:
    """PyTorch's fused attention gives the outputs and gradients of the layer without stages."""
    theirs, ours = model("plain"), model("plain")
    for block in ours.layers:
        block.attention.__class__ = MultiTokenAttention
    check_alike(ours, theirs, ROUNDING["plain"])


def check_alike(ours: Decoder, theirs: Decoder, tolerance: float) -> None:
    tokens = torch.randint(256, (2, 41))
    results = [each(tokens) for each in (ours, theirs)]
    assert relative_error(*results) < tolerance
    cotangent = torch.randn_like(results[0])
    for result in results:
        (result * cotangent).sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert relative_error(parameter.grad, other.grad) < tolerance, name


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).detach().norm() / reference.detach().norm())


@pytest.mark.parametrize("variant", ATTENTION)
def test_generation_is_the_full_pass(variant: str) -> None:
    """Each generated token is the likeliest after those before it, in one pass over all of them."""
    made = model(variant).eval()
    prompt = torch.randint(256, (2, 13))
    continuation = generation.continued(made, prompt, 12).tokens
    full = torch.cat([prompt, continuation], 1)
    with torch.no_grad():
        logits = made(full)
        caches = made.new_caches(2, 25)
        parts = torch.cat([made(part, caches) for part in full.split([13, *[1] * 12], 1)], 1)
    assert torch.equal(logits[:, 12:-1].argmax(-1), continuation)
    assert relative_error(parts, logits) < ROUNDING[variant]


@pytest.mark.parametrize("variant", ATTENTION)
def test_bf16(variant: str) -> None:
    """Autocast and parameters of bf16, as on a GPU, err as bf16 does, and what is sampled are bytes."""
    exact = model(variant)
    tokens = torch.randint(256, (2, 30))
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        results.append(exact.float()(tokens))
        next_token_loss(exact, tokens).backward()
    assert all(parameter.grad is not None for parameter in exact.parameters())
    small = model(variant).bfloat16().eval()
    with torch.no_grad():
        results.append(small(tokens))
    reference = model(variant)(tokens).detach()
    for result in results:
        assert result.dtype == torch.bfloat16
        assert 0 < relative_error(result.double(), reference) < 0.05
    sampled = generation.continued(small, tokens, 5, 1.0, torch.Generator().manual_seed(0)).tokens
    assert sampled.shape == (2, 5)


def test_training_reduces_the_loss(tmp_path: Path) -> None:
    """From that of guessing to much less, in a few steps; the log has what happened."""
    settings = train.Settings(steps=30, batch=4, length=64, lr=5e-3, warmup=5)
    train.Run(settings, tmp_path).train(log_every=1)
    header, *lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert header["settings"]["steps"] == 30
    assert header["environment"]["torch"] == torch.__version__
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[0]["loss"] > 5
    assert lines[-1]["loss"] < 3
    assert max(line["lr"] for line in lines) == lines[4]["lr"] == 5e-3
    assert lines[-1]["lr"] == 0
    assert all(line["tokens_per_s"] > 0 for line in lines)


def test_resumed_training_is_the_same(tmp_path: Path) -> None:
    """To the last bit, in parameters and log, although steps that no checkpoint holds were taken again."""
    whole = train.Run(SETTINGS, tmp_path / "whole")
    whole.train(log_every=1)
    train.Run(SETTINGS, tmp_path / "parts").train(until=3, log_every=1)
    saved = (tmp_path / "parts" / "checkpoint.pt").read_bytes()
    train.Run(SETTINGS, tmp_path / "parts", resume=True).train(until=5, log_every=1)
    (tmp_path / "parts" / "checkpoint.pt").write_bytes(saved)  # as if it had been stopped before it could save
    moved = shutil.copy(train.TEXT, tmp_path / "moved.txt")
    parts = train.Run(SETTINGS, tmp_path / "parts", moved, resume=True)
    assert parts.step == 3
    parts.train(log_every=1)
    for (name, parameter), other in zip(parts.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    logs = [(tmp_path / folder / "log.jsonl").read_text().splitlines()[1:] for folder in ("whole", "parts")]
    first, second = ([(line["step"], line["loss"], line["lr"]) for line in map(json.loads, log)] for log in logs)
    assert first == second


def test_resuming_needs_the_same_settings(tmp_path: Path) -> None:
    """A run with another learning rate or text is another run, and a text must fill a sequence."""
    train.Run(SETTINGS, tmp_path).train(until=1)
    other = tmp_path / "other.txt"
    other.write_bytes(train.TEXT.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"got {'text': '\w+'}; .* was written by a run with other settings"):
        train.Run(SETTINGS, tmp_path, other, resume=True)
    with pytest.raises(ValueError, match=r"got {'lr': 0\.001}; .* by a run with other settings; legal: {'lr': 0\.003}"):
        train.Run(train.Settings(steps=6, batch=2, length=32, lr=1e-3, warmup=2), tmp_path, resume=True)
    with pytest.raises(ValueError, match="1920 bytes, and a sequence needs 1921"):
        train.Run(train.Settings(length=1920), tmp_path / "other")


def test_commands(tmp_path: Path) -> None:
    """Training, resuming and generating from the command line; a wrong name is named."""
    options = "--steps", 4, "--batch", 2, "--length", 32
    assert "starts after step 0" in run(train.main, tmp_path, *options, "--until", 2).output
    resumed = run(train.main, tmp_path, *options, "--resume")
    assert "starts after step 2" in resumed.output, resumed.output
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 4
    made = run(generation.main, tmp_path, "--prompt", "Farewell", "--count", 8)
    assert made.stdout.startswith("Farewell"), made.output
    assert "tokens/s" in made.output
    warm = "--count", 40, "--temperature", 1
    first, again, other = (run(generation.main, tmp_path, *warm, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    assert "there is no" in run(generation.main, tmp_path.parent).output
    assert "nothing to continue" in run(generation.main, tmp_path, "--prompt", "").output
    assert "others is none of" in run(train.main, tmp_path, "--variant", "others").output


PROGRAMS = {
    "train": train,
    "train_distributed": train_distributed,
    "longest": longest,
    "generate": generation,
    "throughput": throughput,
    "corpus": corpus,
    "compare": compare,
    "plot": plot,
}
LAUNCHED = r"^(?:python|torchrun --nproc-per-node \d) -m examples\.gpt\.(\w+) (.*)$"
COMMANDS = re.findall(LAUNCHED, README, flags=re.MULTILINE)


def test_readme_has_commands_of_each_program() -> None:
    assert {program for program, _ in COMMANDS} == {*PROGRAMS}


@pytest.mark.parametrize(("program", "arguments"), COMMANDS)
def test_readme_commands_are_legal(
    program: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their options exist and take these values."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").touch()
    for folder in ("runs/tiny", "runs/300M", "runs/spread", "runs/text", "runs/comparison", "corpus"):
        Path(folder).mkdir(parents=True)
    app = typer.Typer()
    app.command()(PROGRAMS[program].main)
    values = typer.main.get_command(app).make_context(program, shlex.split(arguments)).params
    assert values.get("size", "300M") in SIZES


def test_throughput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender is measured; one that runs out of memory says so, and the next goes on."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes a minute
    measure = throughput.measure

    def limited(size: Size, contender: str, **sizes: Any) -> dict[str, Any]:
        if contender == "authors":
            raise torch.OutOfMemoryError
        return measure(size, contender, **sizes)

    monkeypatch.setattr(throughput, "measure", limited)
    path = tmp_path / "result.json"
    sizes = "--size", "tiny", "--batch", 2, "--length", 16, "--vocabulary", 100, "--steps", 3
    result = run(throughput.main, *sizes, "--json", path, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "out of memory" in result.output
    report = json.loads(path.read_text())
    assert report["environment"]["torch"] == torch.__version__
    assert [each["contender"] for each in report["results"]] == list(throughput.CONTENDERS)
    for each in report["results"]:
        if each["contender"] == "authors":
            assert each["error"] == "out of memory"
        else:
            assert len(each["all_ms"]) == 3
            assert each["ms"] == sorted(each["all_ms"])[1]
            assert each["tokens_per_s"] == pytest.approx(32e3 / each["ms"])
            assert each["cpu_ms"] is None
    assert "nobody is none of" in run(throughput.main, "--variant", "nobody").output
