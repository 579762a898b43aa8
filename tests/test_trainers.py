"""The files of docs/trainers.md, run as printed, against a plain loop over single documents."""

from __future__ import annotations

import copy
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT, blocks, page
from torch import Tensor, nn
from torchrun import torchrun

pytest.importorskip("mtagen.transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = "docs/trainers.md"
STEPS, RATE = 3, 1e-2


def file_of(name: str) -> str:
    """The text of a file on the page."""
    lines = page(PAGE).splitlines()
    (block,) = (x for x in blocks(PAGE, "python") if lines[x.line - 2].endswith(f'title="{name}"'))
    return block.text


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a file of the page, with parts replaced, in a folder where prepare.py has run, and returns its names."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does

    def run_file(name: str, **replaced: str) -> dict[str, Any]:
        text = file_of(name)
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        Path(name).write_text(text, encoding="utf-8")
        return runpy.run_path(name)

    run_file("prepare.py")
    return run_file


def plain_loop(decay: float) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the steps on all documents, each computed alone, and the parameters after them."""
    model = AutoModelForCausalLM.from_pretrained("retrofitted").train()
    documents = [torch.tensor([x]) for x in json.loads(Path("documents.json").read_text(encoding="utf-8"))]
    decays = [x for name, x in model.named_parameters() if x.ndim > 1 and ".stages." not in name]
    others = [x for x in model.parameters() if all(x is not y for y in decays)]
    groups = [{"params": decays, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=RATE), []
    for _ in range(STEPS):
        terms = []
        for x in documents:
            logits = model(x).logits[0, :-1]
            terms.append(nn.functional.cross_entropy(logits, x[0, 1:], reduction="sum"))
        loss = torch.stack(terms).sum() / sum(x.shape[1] - 1 for x in documents)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.named_parameters()}


def check(losses: list[float], parameters: dict[str, Tensor], decay: float) -> None:
    """Sums in another order change losses by a few roundings, and Adam's steps by more where gradients are small."""
    expected, trained = plain_loop(decay)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
    assert losses[-1] < losses[0] - 0.1
    assert parameters.keys() == trained.keys()
    for name, x in parameters.items():
        difference = (x - trained[name]).abs()
        assert difference.max() < 0.02 * RATE * STEPS, name


def logged(history: list[dict[str, float]]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]


# Both ways to shard in the same processes. accelerate shards on GPUs only, but its code for it runs on CPUs, too.
BOTH = """
import runpy
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

def run(name):
    parameters = runpy.run_path(name)["trainer"].model.parameters()
    assert all(type(x).__name__ == "DTensor" for x in parameters), name

def begin_as_on_gpus(self, *arguments, begin=PartialState.__init__, **options):
    begin(self, *arguments, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU

run("train.py")
AcceleratorState._reset_state(reset_partial_state=True)
PartialState.__init__ = begin_as_on_gpus
run("train_by_accelerate.py")
"""


def test_trainer_with_sharded_parameters(run: Run, tmp_path: Path) -> None:
    distributed = pytest.importorskip("transformers.distributed", reason="transformers does not shard yet")
    if "fsdp_size" not in signature(distributed.DistributedConfig).parameters:
        pytest.skip("transformers does not shard by FSDP2 yet")
    text = file_of("train.py")
    options = 'fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}'
    other = text.replace(", distributed_config=sharding", "").replace("report_to=[]", f"report_to=[], {options}")
    files = {"train.py": text, "train_by_accelerate.py": other.replace('"trained"', '"by_accelerate"'), "both.py": BOTH}
    for name, content in files.items():
        Path(name).write_text(content, encoding="utf-8")
    done = torchrun(2, "both.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for folder in ("trained", "by_accelerate"):
        state = json.loads(Path(folder, "trainer_state.json").read_text(encoding="utf-8"))
        trained = AutoModelForCausalLM.from_pretrained(folder)
        check(logged(state["log_history"]), dict(trained.named_parameters()), decay=0.1)


def test_sft_trainer(run: Run) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    trainer = run("sft.py")["trainer"]
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1
    check(logged(trainer.state.log_history), dict(trainer.model.named_parameters()), decay=0.0)

    joined = run("sft.py", **{"packing=True": 'packing=True, packing_strategy="wrapped"'})["trainer"]
    first, other = logged(trainer.state.log_history)[0], logged(joined.state.log_history)[0]
    assert abs(first - other) > 1e-3 * first


@pytest.mark.filterwarnings("ignore")
def test_lightning(run: Run) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    kept = {"class ": "losses = []\n\n\nclass ", "return loss": "losses.append(loss.item())\n        return loss"}
    names = run("fit.py", **kept)
    loaded, fitted = (dict(x.model.named_parameters()) for x in (names["fitted"], names["trainer"].model))
    assert all(torch.equal(loaded[name], x) for name, x in fitted.items())
    check(names["losses"], loaded, decay=0.1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
def test_exported_and_compiled(run: Run) -> None:
    """Compiled code rounds in another order. Other processes get the same bits once they have made the model."""
    names = run("export.py")
    model, code = names["model"], names["code"]
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for size in ((2, 30), (1, 1), (3, 41), (5, 2)):
            x = torch.randint(64, size)
            expected, eager = exact(x).logits, model(x).logits
            assert torch.equal(names["program"].module()(input_ids=x).logits, eager)
            compiled = code(input_ids=x).logits
            assert (compiled - expected).abs().max() <= 2 * (eager - expected).abs().max()
    torch.save((x, eager, compiled), "logits.pt")
    script = """
import torch
import mtagen.transformers
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("retrofitted")
x, eager, compiled = torch.load("logits.pt")
assert torch.equal(torch.export.load("program.pt2").module()(input_ids=x).logits, eager)
assert torch.equal(torch._inductor.aoti_load_package("code.pt2")(input_ids=x).logits, compiled)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_checkpoints(run: Run) -> None:
    first = run("resume.py")["loss"].item()
    second = run("resume.py")
    assert second["loss"].item() < first
    assert {state["step"].item() for state in second["optimizer"].state.values()} == {2}
