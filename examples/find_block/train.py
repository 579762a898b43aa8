"""Training: one model from settings to a log, with checkpoints that it continues from as if it had never stopped."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mtagen
from mtagen.errors import InputError, explain

from ..decoder import generate
from .data import TEST_STREAM, Batches, Task
from .model import Size, make_decoder

LOG, CHECKPOINT = "log.jsonl", "checkpoint.pt"


@dataclass(frozen=True)
class Settings:
    """What a run computes. The defaults are the paper's for this task.

    Attributes:
        task: what is learnt.
        size: of the model.
        kernel: extents of the convolution of all layers; None: plain attention.
        batch: samples of a step.
        lr: the learning rate, constant after the warm-up.
        warmup: steps in which the learning rate grows in proportion to them.
        samples: for training, before the same come again; None: each step has new ones.
        test_samples: that the error is measured on, the same in all runs of a task.
        seed: 0..254, of the weights, the samples and dropout.
    """

    task: Task = field(default_factory=Task)
    size: Size = field(default_factory=Size)
    kernel: tuple[int, int] | None = (2, 9)
    batch: int = 64
    lr: float = 1e-4
    warmup: int = 1000
    samples: int | None = 1_000_000
    test_samples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < TEST_STREAM:
            raise InputError(explain("seed", self.seed, "is out of range", f"0..{TEST_STREAM - 1}"))


class Trainer:
    """A model, its optimizer and how far they are.

    On a GPU products are computed in bf16 (``torch.autocast``), parameters and their updates in fp32.

    Args:
        settings: of the run.
        device: where it runs.
        compile_model: whether steps go through ``torch.compile``.
        cuda_graph: whether steps, but for the first few, are launches of one CUDA graph.

    Raises:
        InputError: a CUDA graph is asked for where there is no GPU.
    """

    def __init__(
        self, settings: Settings, device: torch.device, compile_model: bool = False, cuda_graph: bool = False
    ) -> None:
        if cuda_graph and device.type != "cuda":
            raise InputError(explain("--cuda-graph", str(device), "needs a GPU", "no --cuda-graph, or --device cuda"))
        self.settings, self.device = settings, device
        torch.manual_seed(settings.seed)
        self.model = make_decoder(settings.task.vocabulary, settings.size, settings.kernel, device)
        # A graph reads the learning rate of its step on the GPU.
        self._lr = torch.zeros((), device=device) if cuda_graph else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr if self._lr is None else self._lr,
            betas=(0.9, 0.98),
            weight_decay=0,
            fused=device.type == "cuda",
            capturable=cuda_graph,
        )
        self._forward = torch.compile(self.model, fullgraph=True) if compile_model else self.model
        self._learn = _Graphed(self._learn_from) if cuda_graph else self._learn_from
        self.steps = 0
        self.seconds = 0.0

    def autocast(self) -> Any:
        """Computes in bf16 on a GPU, and as it is on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def batches(self, workers: int) -> DataLoader[Tensor]:
        """All batches from the next step's on."""
        settings = self.settings
        return DataLoader(
            Batches(settings.task, settings.batch, settings.seed, settings.samples),
            batch_size=None,
            sampler=count(self.steps),
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # so that it draws nothing from the one of dropout
        )

    def step(self, tokens: Tensor) -> Tensor:
        """Learn from a batch ``(B, length)``. Returns the mean loss of the answers' tokens, on the device."""
        lr = self.settings.lr * min(1, (self.steps + 1) / self.settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self._lr is None else self._lr.fill_(lr)
        loss = self._learn(tokens.to(self.device, non_blocking=True))
        self.steps += 1
        return loss

    def _learn_from(self, tokens: Tensor) -> Tensor:
        answers = tokens[:, self.settings.task.prompt_length :]
        with self.autocast():
            logits = self._forward(tokens[:, :-1])[:, -answers.shape[1] :]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1)
        self.optimizer.step()
        return loss.detach()

    def error(self) -> float:
        """The share of test samples, 0..1, whose block is not generated letter by letter as it stands."""
        task, wrong = self.settings.task, 0
        test = Batches(task, self.settings.test_samples, TEST_STREAM)[0]
        self.model.eval()
        for part in torch.split(test, 256):
            prompts, answers = torch.split(part.to(self.device), [task.prompt_length, task.block_length], 1)
            with self.autocast():
                generated = torch.cat([*generate(self.model, prompts, task.block_length)], 1)
            wrong += int((generated != answers).any(1).sum())
        self.model.train()
        return wrong / len(test)

    def save(self, path: Path) -> None:
        """Write a checkpoint; an earlier one is replaced when the new one is complete."""
        state = {
            "settings": json.dumps(asdict(self.settings)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            InputError: it is of a run with other settings.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        theirs, mine = (json.loads(text) for text in (state["settings"], json.dumps(asdict(self.settings))))
        others = [name for name, value in mine.items() if theirs.get(name) != value]
        if others:
            got, legal = ({name: settings.get(name) for name in others} for settings in (theirs, mine))
            raise InputError(explain("checkpoint", got, "is of a run with other settings", legal))
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # are of the settings, and of how steps are computed here
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
        self.steps, self.seconds = state["steps"], state["seconds"]
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"])


class _Graphed:
    """A function of tokens ``(B, length)`` as one CUDA graph, so that the GPU need not wait for each kernel's launch.

    The first calls run as they are: they compile kernels, and allocate what later ones update.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], plain_calls: int = 3) -> None:
        self._function, self._plain_calls = function, plain_calls
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        if self._plain_calls:
            self._plain_calls -= 1
            return self._function(tokens)
        if self._graph is None:
            self._graph, self._tokens = torch.cuda.CUDAGraph(), tokens.clone()
            # The thread that pins batches goes on with calls to CUDA, which are no part of the graph.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = self._function(self._tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._result.clone()


def train(
    settings: Settings,
    folder: Path,
    steps: int,
    *,
    device: torch.device,
    evaluate_every: int = 1000,
    workers: int = 0,
    compile_model: bool = False,
    cuda_graph: bool = False,
    resume: bool = False,
) -> float:
    """Train, and write a log and checkpoints to a folder.

    The log has a line of settings and versions, then one for each evaluation: steps, the mean loss of the steps since
    the one before, the error on the test samples, and the seconds that steps took, without evaluations.

    Args:
        settings: of the run.
        folder: made if absent.
        steps: in all, those before a checkpoint too.
        device: where it runs.
        evaluate_every: steps between evaluations, each of which writes a checkpoint.
        workers: processes that draw samples; 0: this one does.
        compile_model: whether steps go through ``torch.compile``.
        cuda_graph: whether steps, but for the first few, are launches of one CUDA graph.
        resume: whether to continue from the folder's checkpoint; without one yet, the run begins anew.

    Returns:
        The last error on the test samples, 0..1.

    Raises:
        InputError: the folder has a log of a run that is not to be resumed, or that had other settings; or it has a
            checkpoint to resume and no log; or a CUDA graph is asked for where there is no GPU.
    """
    log, checkpoint = folder / LOG, folder / CHECKPOINT
    if log.exists() and not resume:
        raise InputError(explain("folder", str(folder), "has a log of another run", "--resume, or another folder"))
    trainer = Trainer(settings, device, compile_model, cuda_graph)
    lines = [json.dumps({"settings": asdict(settings), "environment": _environment(device)})]
    error = 1.0
    if resume and checkpoint.exists():
        if not log.exists():
            raise InputError(explain("folder", str(folder), "has a checkpoint and no log", f"both, or no {CHECKPOINT}"))
        trainer.load(checkpoint)
        lines = [line for line in log.read_text().splitlines() if json.loads(line).get("steps", 0) <= trainer.steps]
        error = json.loads(lines[-1])["error"]
    folder.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"{line}\n" for line in lines))

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task(describe(settings.kernel), total=steps, completed=trainer.steps, state="")
        losses: list[Tensor] = []
        started = time.perf_counter()
        for batch in trainer.batches(workers):
            if trainer.steps >= steps:
                break
            losses.append(trainer.step(batch))
            progress.update(bar, completed=trainer.steps)
            if trainer.steps % evaluate_every and trainer.steps < steps:
                continue
            loss = torch.stack(losses).mean().item()  # waits for the steps
            trainer.seconds += time.perf_counter() - started
            error = trainer.error()
            entry = {"steps": trainer.steps, "loss": loss, "error": error, "seconds": round(trainer.seconds, 2)}
            with log.open("a") as file:
                file.write(f"{json.dumps(entry)}\n")
            trainer.save(checkpoint)  # after the entry, for a resumed run reads it and drops later ones
            progress.update(bar, state=f"loss {loss:.3f}, error {error:.1%}")
            losses, started = [], time.perf_counter()
    return error


def describe(kernel: tuple[int, int] | None) -> str:
    """The name of a model."""
    return "plain attention" if kernel is None else f"multi-token attention {kernel[0]} x {kernel[1]}"


def _environment(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "mtagen": mtagen.__version__,
    }
