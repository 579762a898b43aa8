"""The decoder on real text: the corpus, validation, and the comparison of attentions."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from examples.gpt import compare, corpus, data, generate, plot, train
from examples.gpt.model import ATTENTION, SIZES, count_parameters, make_decoder, next_token_loss
from examples.runs import Stopwatch
from mtagen.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ("the", "of", "kernel", "memory", "page", "a", "driver", "reads", "writes", "each", "device", "when", "value")
SETTINGS = train.Settings(steps=4, batch=2, length=16, lr=3e-3, warmup=2)


def document(seed: int) -> str:
    words = random.Random(seed).choices(WORDS, k=160)
    return "\n\n".join(" ".join(words[start : start + 32]) for start in range(0, 160, 32))


DOCUMENTS = {f"./usr/doc/{number:02}.txt": document(number).encode() for number in range(30)}
OTHERS = {
    "./usr/doc/99.txt.gz": gzip.compress(f"SPDX-License-Identifier: MIT\n{document(99)}".encode()),
    "./usr/doc/old/50.txt": document(50).encode(),
    "./usr/doc/51.html": document(51).encode(),
    "./usr/doc/52.txt": ("ядро " * 200).encode(),
    "./usr/doc/53.txt": f"{document(53)} caf\xe9".encode("latin-1"),
    "./usr/doc/54.txt": document(0).encode(),  # a copy
}


def debian_package(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", packed.getvalue())):
        archive += f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


def package(archive: bytes, **others: str) -> corpus.Package:
    facts = {"path": "pool/some_1_all.deb", "documents": r"\.txt$", "excluded": "/old/"} | others
    return corpus.Package("some", "1", sha256=hashlib.sha256(archive).hexdigest(), licence="MIT", **facts)


def built(folder: Path, downloads: Path, **options: Any) -> dict[str, Any]:
    archive = debian_package(DOCUMENTS | OTHERS)
    downloads.mkdir(exist_ok=True)
    (downloads / "some_1_all.deb").write_bytes(archive)
    options = {"vocabulary": 300, "validation_bytes": 4000} | options
    return corpus.build(folder, [package(archive)], downloads, **options)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    built(folder / "made", folder / "downloads")
    return folder / "made"


def decoded(folder: Path, name: str) -> list[str]:
    """The documents of a split."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / data.TOKENIZER))
    tokens = data.decode_tokens((folder / name).read_bytes()).tolist()
    *documents, rest = tokenizer.decode(tokens, skip_special_tokens=False).split(corpus.END)
    assert not rest
    return documents


def run(main: Any, *arguments: object) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def entries(folder: Path) -> list[dict[str, Any]]:
    """Lines of a log after the first, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
    return [{name: value for name, value in line.items() if name not in ("seconds", "tokens_per_s")} for line in lines]


def test_documents_of_a_package() -> None:
    """Those that the patterns choose, in English, also compressed ones, without their headers."""
    archive = debian_package(DOCUMENTS | OTHERS)
    found = corpus.read_documents(package(archive), archive)
    assert [*found] == [*DOCUMENTS, "./usr/doc/54.txt", "./usr/doc/99.txt"]
    assert found["./usr/doc/99.txt"] == document(99)
    assert found["./usr/doc/00.txt"] == document(0)
    with pytest.raises(InputError, match="is not the beginning of a Debian package"):
        corpus.read_documents(package(archive), b"PK")


@pytest.mark.parametrize(
    "line",
    [
        ".. SPDX-License-Identifier: GPL-2.0",
        "   Copyright 2001 Somebody",
        ".. Copyright (C) 2001 Somebody",
        " vim:tw=78:ts=8:noet:ft=help:norl:",
        ".. -*- coding: utf-8; mode: rst -*-",
        "=encoding utf8",
        ".. include:: <isonum.txt>",
    ],
)
def test_boilerplate(line: str) -> None:
    assert corpus.clean(f"first  \n\n{line}\n\n\tsecond\n") == "first\n\n        second"


def test_text_is_no_boilerplate() -> None:
    for line in ("Vim is an editor: set it up.", "The copyright holder is asked first.", "use the `cut` command"):
        assert corpus.clean(line) == line


def test_repeats_are_dropped() -> None:
    """A document that occurs twice, and a long paragraph, even in other lines; short ones may recur."""
    long = " ".join(WORDS * 3)
    documents = [
        f"{document(1)}\n\n{long}\n\nSee also",
        document(1),
        f"{document(2)}\n\n{long.replace(' ', chr(10))}\n\nSee also",
    ]
    assert corpus.without_repeats(documents) == [documents[0], f"{document(2)}\n\nSee also"]


def test_corpus(text: Path) -> None:
    """Both splits together are the documents without repeats, no document is in both, and the description counts."""
    about = json.loads((text / data.ABOUT).read_text())
    splits = {name: decoded(text, name) for name in (data.TRAIN, data.VALIDATION)}
    together = [*splits[data.TRAIN], *splits[data.VALIDATION]]
    assert sorted(together) == sorted({*map(document, [*range(30), 99])})
    loaded = data.load_data(text)
    assert loaded.validation is not None
    for name, tokens in ((data.TRAIN, loaded.train), (data.VALIDATION, loaded.validation)):
        size = sum(len(each.encode()) for each in splits[name])
        assert about[name]["documents"] == len(splits[name])
        assert about[name]["bytes"] == size == loaded.token_bytes[tokens].sum()
        assert about[name]["tokens"] == len(tokens)
        assert about[name]["sha256"] == hashlib.sha256((text / name).read_bytes()).hexdigest()
    assert 4000 <= about[data.VALIDATION]["bytes"] < 6000
    assert about["packages"][0]["licence"] == "MIT"
    assert loaded.vocabulary == about["vocabulary"] == 300
    assert loaded.train.dtype == torch.int64
    assert loaded.token_bytes[0] == 0  # the end of a document


def test_corpus_is_the_same_each_time(text: Path, tmp_path: Path) -> None:
    """To the last byte; another seed splits otherwise."""
    built(tmp_path / "again", tmp_path)
    for name in (data.TRAIN, data.VALIDATION, data.TOKENIZER, data.ABOUT):
        assert (tmp_path / "again" / name).read_bytes() == (text / name).read_bytes()
    built(tmp_path / "other", tmp_path, seed=1)
    assert {*decoded(tmp_path / "other", data.VALIDATION)} != {*decoded(text, data.VALIDATION)}


def test_corpora_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leaves no document to train on"):
        built(tmp_path / "made", tmp_path, validation_bytes=10**6)
    with pytest.raises(InputError, match=r"vocabulary: got 256; .* legal: 257\.\.65536"):
        built(tmp_path / "made", tmp_path, vocabulary=256)
    assert not (tmp_path / "made").exists()


def test_packages_are_fetched_once_and_checked(tmp_path: Path) -> None:
    archive = debian_package(DOCUMENTS)
    wanted, place = package(archive, path="pool/some_1%3a2_all.deb"), tmp_path / "downloads" / "some_1%3a2_all.deb"
    mirror = (tmp_path / "mirror").as_uri()
    with pytest.raises(InputError, match=r"some_1%253a2_all\.deb: .*cannot be fetched; legal: another --mirror"):
        corpus.fetch(wanted, place.parent, mirror)
    (tmp_path / "mirror" / "pool").mkdir(parents=True)
    (tmp_path / "mirror" / wanted.path).write_bytes(archive)
    assert corpus.fetch(wanted, place.parent, mirror) == archive
    shutil.rmtree(tmp_path / "mirror")
    assert corpus.fetch(wanted, place.parent, mirror) == archive
    place.write_bytes(archive[:-1])
    with pytest.raises(InputError, match="the file is damaged or another version; remove it"):
        corpus.fetch(wanted, place.parent, mirror)


def test_folders_that_are_no_corpus(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(text, folder)
    (folder / data.VALIDATION).write_bytes(b"\x2c\x01")
    with pytest.raises(InputError, match=r"got 'token 300'; is not in tokenizer\.json; legal: 0\.\.299"):
        data.load_data(folder)
    (folder / data.TOKENIZER).unlink()
    with pytest.raises(InputError, match=r"lacks tokenizer\.json"):
        data.load_data(folder)


def test_tokens_on_the_disk() -> None:
    """All numbers of 16 bits, the low byte first."""
    from array import array

    numbers = array("H", [0, 1, 255, 256, 32768, 65535])
    content = data.encode_tokens(numbers)
    assert content[6:8] == b"\x00\x01"
    assert data.decode_tokens(content).tolist() == [0, 1, 255, 256, 32768, 65535]
    assert len(data.decode_tokens(b"")) == 0


def test_validation_windows() -> None:
    """Parts of the text that share no predicted token, the same ones whatever torch's random state is."""
    tokens = torch.arange(1000)
    torch.manual_seed(1)
    windows = data.validation_windows(tokens, 30, 20)
    torch.manual_seed(2)
    assert torch.equal(windows, data.validation_windows(tokens, 30, 20))
    assert windows.shape == (20, 31)
    assert (windows[:, 1:] == windows[:, :-1] + 1).all()
    assert len(windows[:, 1:].unique()) == 20 * 30
    assert torch.equal(data.validation_windows(tokens, 30, 4), windows[:4])
    with pytest.raises(InputError, match=r"got 34; the 1000 validation tokens hold 33 windows .* legal: 1\.\.33"):
        data.validation_windows(tokens, 30, 34)


def test_validation(text: Path, tmp_path: Path) -> None:
    """The mean loss over all windows, after the steps that were asked for and the last; training is as without it."""
    made = train.Run(SETTINGS, tmp_path / "often", text, "cpu", windows=6)
    made.train(log_every=1, validate_every=3)
    logged = entries(tmp_path / "often")
    assert ["validation_loss" in entry for entry in logged] == [False, False, True, True]
    with torch.no_grad():
        loss = next_token_loss(made.model, made.windows).item()
    assert logged[-1]["validation_loss"] == pytest.approx(loss, rel=1e-6)
    loaded = data.load_data(text)
    nats = loss * 6 * 16 / loaded.token_bytes[made.windows[:, 1:]].sum().item()
    assert logged[-1]["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-6)
    train.Run(SETTINGS, tmp_path / "once", text, "cpu", windows=6).train(log_every=1, validate_every=4)
    assert [entry["loss"] for entry in entries(tmp_path / "once")] == [entry["loss"] for entry in logged]
    with pytest.raises(InputError, match="must be a multiple of the batch; legal: a multiple of 2"):
        train.Run(SETTINGS, tmp_path / "odd", text, "cpu", windows=5)
    with pytest.raises(InputError, match="tokens, and a sequence needs"):
        train.Run(replace(SETTINGS, length=10**6), tmp_path / "odd", text, "cpu")


@pytest.mark.parametrize("variant", ["mta", "plain"])
def test_resumed_training_is_the_same(text: Path, tmp_path: Path, variant: str) -> None:
    """To the last bit, validations too; seconds go on."""
    settings = replace(SETTINGS, variant=variant)
    whole = train.Run(settings, tmp_path / "whole", text, "cpu", windows=4)
    whole.train(log_every=1, validate_every=2)
    train.Run(settings, tmp_path / "parts", text, "cpu", windows=4).train(until=3, log_every=1, validate_every=2)
    parts = train.Run(settings, tmp_path / "parts", text, "cpu", windows=4, resume=True)
    before = parts.watch.seconds
    assert before > 0
    parts.train(log_every=1, validate_every=2)
    for (name, parameter), other in zip(parts.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    assert parts.watch.seconds > before
    with pytest.raises(InputError, match=r"got {'windows': 6}; .* was written by a run with other settings"):
        train.Run(settings, tmp_path / "parts", text, "cpu", windows=6, resume=True)


def test_seconds_are_those_of_steps(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither validations, nor checkpoints, nor the first calls that compile count."""
    now = [0.0]
    monkeypatch.setattr(Stopwatch, "_now", lambda self: now[0])

    def slow(name: str, seconds: Callable[[], float]) -> None:
        function = getattr(train.Run, name)

        def method(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds()
            return function(*arguments, **options)

        monkeypatch.setattr(train.Run, name, method)

    slow("take_step", lambda: 1)
    slow("_loss_of", lambda: 0 if torch.is_grad_enabled() else 10)  # of a validation
    slow("_write", lambda: 100)
    slow("_warm_up", lambda: 1000)
    train.Run(SETTINGS, tmp_path, text, "cpu", windows=4).train(log_every=1, save_every=2, validate_every=2)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()[1:]]
    assert [line["seconds"] for line in lines] == [1, 2, 3, 4]
    assert {line["tokens_per_s"] for line in lines} == {32}


def test_a_seed_starts_all_variants_alike() -> None:
    """Parameters that variants share have the same values; the variants that are trained have batches of one order."""
    started = []
    for variant in ATTENTION:
        torch.manual_seed(3)
        started.append(dict(make_decoder(SIZES["tiny"], variant, 300).named_parameters()))
    shared = {*started[0]}.intersection(*started)
    assert len(shared) == 4 * 9 + 2
    for other in started[1:]:
        assert all(torch.equal(started[0][name], other[name]) for name in shared)


def test_parameters_on_the_page() -> None:
    page = (Path(train.__file__).with_name("README.md")).read_text(encoding="utf-8")
    with torch.device("meta"):
        plain, mta = (count_parameters(make_decoder(SIZES["30M"], variant, 8192)) for variant in ("plain", "mta"))
    assert f"`plain` has {plain:,} parameters, `mta` {mta:,}" in page
    assert f"{mta - plain:,}, or {(mta - plain) / plain:.3%}".replace("%", " %") in page


def test_generation_by_the_tokenizer(text: Path, tmp_path: Path) -> None:
    """A run keeps its tokenizer, by which the prompt is read and the continuation is written."""
    options = "--corpus", text, "--steps", 2, "--batch", 2, "--length", 16, "--windows", 2
    trained = run(train.main, tmp_path, *options)
    assert trained.exit_code == 0, trained.output
    assert (tmp_path / data.TOKENIZER).read_bytes() == (text / data.TOKENIZER).read_bytes()
    made = run(generate.main, tmp_path, "--prompt", "the kernel", "--count", 3)
    assert made.stdout.startswith("the kernel"), made.output
    encode, decode = generate.read_codec(tmp_path)
    assert len(encode("the kernel reads")) < len("the kernel")
    assert decode(encode("the kernel reads é")) == "the kernel reads é"
    encode, decode = generate.read_codec(tmp_path.parent)
    assert encode("é") == [0xC3, 0xA9]
    assert decode([0xC3, 0xA9]) == "é"


def test_comparison(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs, in two calls because the first has no time; then picture, tables and logs, which can be drawn anew."""
    batches: dict[str, list[Tensor]] = {}
    sample = train.sample

    def kept(tokens: Tensor, settings: train.Settings, generator: torch.Generator) -> Tensor:
        made = sample(tokens, settings, generator)
        batches.setdefault(f"{settings.variant}-{settings.seed}", []).append(made)
        return made

    monkeypatch.setattr(train, "sample", kept)
    sizes = "--size", "tiny", "--steps", 3, "--batch", 2, "--length", 16, "--windows", 2, "--warmup", 1
    command = (tmp_path / "runs", "--corpus", text, *sizes, "--validate-every", 1, "--device", "cpu")
    results = tmp_path / "results"
    stopped = run(compare.main, *command, "--seconds", 0)
    assert stopped.exit_code == 1
    assert "saved after 0 seconds; run the same command to continue" in stopped.output
    done = run(compare.main, *command, "--results", results)
    assert done.exit_code == 0, done.output
    names = ["mta-0", "mta-1", "plain-0", "plain-1"]
    assert sorted(batches) == names
    for seed in "01":
        assert torch.equal(torch.stack(batches[f"mta-{seed}"]), torch.stack(batches[f"plain-{seed}"]))
    assert not torch.equal(batches["mta-0"][0], batches["mta-1"][0])
    assert {path.name for path in results.iterdir()} == {
        "comparison.png",
        "comparison.json",
        "comparison.md",
        *(f"{name}.jsonl" for name in names),
    }
    assert (results / "comparison.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((results / "comparison.json").read_text())
    last = entries(tmp_path / "runs" / "mta-1")[-1]
    assert summary["variants"]["mta"]["seeds"]["1"]["validation_loss"] == last["validation_loss"]
    assert summary["variants"]["mta"]["parameters"] > summary["variants"]["plain"]["parameters"]
    mean = summary["variants"]["plain"]["mean"]
    table = (results / "comparison.md").read_text()
    assert f"| plain attention | {summary['variants']['plain']['parameters']:,} | mean | 3 | " in table
    assert f"| {mean['validation_loss']:.4f} | {mean['bits_per_byte']:.4f} |" in table
    assert table.strip() in done.output
    again = run(plot.main, results, "--results", tmp_path / "again", "--commit", "abc")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again" / "comparison.json").read_text())["variants"] == summary["variants"]
    assert run(compare.main, *command).exit_code == 0  # all runs are finished
    assert sum(map(len, batches.values())) == 4 * 3


def test_a_deadline_saves(text: Path, tmp_path: Path) -> None:
    """A run whose time is over returns and goes on later as if it had not."""
    train.Run(SETTINGS, tmp_path / "whole", text, "cpu", windows=2).train()
    stopped = train.Run(SETTINGS, tmp_path / "parts", text, "cpu", windows=2)
    stopped.train(deadline=0)
    assert stopped.step == 0
    train.Run(SETTINGS, tmp_path / "parts", text, "cpu", windows=2, resume=True).train()
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")


def test_runs_that_do_not_compare(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no log with a validation"):
        plot.read_curves(tmp_path)
    for name, settings in (("a", SETTINGS), ("b", replace(SETTINGS, variant="plain", lr=1e-3))):
        train.Run(settings, tmp_path / name, text, "cpu", windows=2).train()
    with pytest.raises(InputError, match=r"'lr': 0\.001.*its settings differ from those of .*; legal: .*'lr': 0\.003"):
        plot.read_curves(tmp_path)
