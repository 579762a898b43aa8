"""Train one model and write a log and checkpoints. A resumed run continues as if it had never stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mtagen.errors import InputError, explain

from ..decoder import generate
from ..runs import (
    CHECKPOINT,
    LOG,
    Interrupt,
    Interrupted,
    Log,
    check_settings,
    default_interval,
    environment,
    ignore_interrupts,
    publish,
    read_checkpoint,
)
from .data import TEST_STREAM, Batches, Task
from .model import Size, make_decoder


@dataclass(frozen=True)
class Settings:
    """Settings that determine the result of a run. The defaults are the paper's for this task.

    Attributes:
        task: the task to learn.
        size: the size of the model.
        kernel: extents of the convolution in all layers; None: plain attention.
        batch: number of samples in a step.
        lr: the learning rate, constant after the warm-up.
        warmup: number of steps during which the learning rate grows linearly.
        samples: number of training samples before the same batches come again; None: each step has new samples.
        test_samples: number of samples that the error is measured on. They are the same in all runs of a task.
        seed: seed of the weights, the samples and dropout, 0..254.
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
    """A model, its optimizer and their progress: steps, seconds, and the losses since the last evaluation.

    On a GPU products are computed in bf16 (``torch.autocast``). Parameters and their updates are in fp32.

    Args:
        settings: the settings of the run.
        device: the device to train on.
        compile_model: whether ``torch.compile`` compiles the model.
        cuda_graph: whether to launch each step as one CUDA graph, except the first few steps.

    Raises:
        InputError: ``cuda_graph`` is set, and ``device`` is no GPU.
    """

    def __init__(
        self, settings: Settings, device: torch.device, compile_model: bool = False, cuda_graph: bool = False
    ) -> None:
        if cuda_graph and device.type != "cuda":
            raise InputError(explain("device", str(device), "--cuda-graph needs a GPU", "cuda, or no --cuda-graph"))
        self.settings, self.device = settings, device
        torch.manual_seed(settings.seed)
        self.model = make_decoder(settings.task.vocabulary, settings.size, settings.kernel, device)
        # A CUDA graph cannot take a new number from the CPU, so it reads the learning rate from a tensor on the GPU.
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
        self.losses: list[Tensor] = []

    def autocast(self) -> Any:
        """Return the context of the computation: bf16 autocast on a GPU, no change on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def batches(self, workers: int) -> DataLoader[Tensor]:
        """Return an endless loader of batches that begins with the batch of the next step."""
        settings = self.settings
        return DataLoader(
            Batches(settings.task, settings.batch, settings.seed, settings.samples),
            batch_size=None,
            sampler=count(self.steps),
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # so that the loader draws nothing from the generator of dropout
            worker_init_fn=ignore_interrupts,
        )

    def step(self, tokens: Tensor) -> Tensor:
        """Take a step on a batch ``(B, length)``.

        Returns:
            The mean loss of the answers' tokens, on the device. :attr:`losses` keeps it, too.
        """
        lr = self.settings.lr * min(1, (self.steps + 1) / self.settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self._lr is None else self._lr.fill_(lr)
        loss = self._learn(tokens.to(self.device, non_blocking=True))
        self.steps += 1
        self.losses.append(loss)
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
        """Return the fraction of test samples (0..1) whose block the model does not generate exactly."""
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
        """Write a checkpoint. The previous checkpoint stays until the new one is complete."""
        state = {
            "settings": json.dumps(asdict(self.settings)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
            "losses": torch.stack(self.losses).cpu() if self.losses else torch.empty(0),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        publish(path, lambda file: torch.save(state, file))

    def load(self, path: Path) -> None:
        """Load a checkpoint.

        Raises:
            InputError: the checkpoint is damaged, or comes from a run with other settings.
        """
        state = read_checkpoint(path, "settings", "model", "optimizer", "steps", "seconds", "random", "random_cuda")
        theirs, ours = (json.loads(text) for text in (state["settings"], json.dumps(asdict(self.settings))))
        check_settings(path, theirs, ours)
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # follow from settings, device and cuda_graph
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
        self.steps, self.seconds = state["steps"], state["seconds"]
        # Checkpoints of earlier versions have no losses, because they were saved only after an evaluation.
        self.losses = [*state.get("losses", torch.empty(0)).to(self.device)]
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"])


class _Graphed:
    """A function of tokens ``(B, length)`` as one CUDA graph, so that the GPU need not wait for each kernel's launch.

    The first calls run without a graph, because they compile kernels and allocate the state that later calls update.
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
            # The thread that pins batches keeps calling CUDA during the capture, and its calls must not join the graph.
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
    evaluate_every: int | None = None,
    workers: int = 0,
    compile_model: bool = False,
    cuda_graph: bool = False,
    resume: bool = False,
) -> float:
    """Train, and write a log and checkpoints to a folder.

    The first line of the log has the settings and versions. A line for each evaluation follows: steps, the mean loss of
    the steps since the previous evaluation, the error on the test samples, and the seconds that steps took, without
    evaluations. A killed run can resume from its last checkpoint. The first checkpoint is written before the first
    step.

    Args:
        settings: the settings of the run.
        folder: the folder to write to; made if absent.
        steps: total number of steps, including the steps before a checkpoint.
        device: the device to train on.
        evaluate_every: number of steps between evaluations; None: a tenth of ``steps``, at most 1000. Each evaluation
            writes a checkpoint.
        workers: number of processes that draw samples; 0: this process draws them.
        compile_model: whether ``torch.compile`` compiles the model.
        cuda_graph: whether to launch each step as one CUDA graph, except the first few steps.
        resume: whether to continue from the folder's checkpoint. Without a checkpoint the run begins anew.

    Returns:
        The last error on the test samples, 0..1.

    Raises:
        InputError: the folder has a run, and ``resume`` is not set or the run had other settings; or its checkpoint
            or log is missing or damaged; or ``cuda_graph`` is set, and ``device`` is no GPU.
        Interrupted: Ctrl-C was pressed. The steps until then are saved.
    """
    log, checkpoint = Log(folder / LOG, "steps"), folder / CHECKPOINT
    log.check_start(checkpoint if checkpoint.exists() else None, resume)
    trainer = Trainer(settings, device, compile_model, cuda_graph)
    if checkpoint.exists():
        trainer.load(checkpoint)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        trainer.save(checkpoint)  # before the log, because a log without a checkpoint cannot be resumed
    entries = log.continue_at(trainer.steps, [{"settings": asdict(settings), "environment": environment(device)}])
    error: float = entries[-1].get("error", 1.0)
    name = describe(settings.kernel)
    if trainer.steps >= steps:
        typer.echo(f"{name}: already finished, {trainer.steps:,} of {steps:,} steps; pass a larger --steps to continue")
        return error

    every = evaluate_every or default_interval(steps)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}")
    console = Console()
    shown = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    with shown as progress, Interrupt() as interrupt:
        bar = progress.add_task(name, total=steps, completed=trainer.steps, state="")
        started = time.perf_counter()
        for batch in trainer.batches(workers):
            trainer.step(batch)
            progress.update(bar, completed=trainer.steps)
            evaluates = trainer.steps % every == 0 or trainer.steps == steps
            if not (evaluates or interrupt.asked):
                continue
            loss = torch.stack(trainer.losses).mean().item()  # waits until the device has finished the steps
            trainer.seconds += time.perf_counter() - started
            if evaluates:
                error = trainer.error()
                seconds = round(trainer.seconds, 2)
                log.append({"steps": trainer.steps, "loss": loss, "error": error, "seconds": seconds})
                log.sync()
                trainer.losses.clear()
                state = f"loss {loss:.3f}, error {error:.1%}"
                progress.update(bar, state=state)
                if not console.is_terminal:  # a pipe or a file shows no progress bar
                    typer.echo(f"{name}: step {trainer.steps:,} of {steps:,}, {state}, {seconds:.0f} s")
            trainer.save(checkpoint)  # after the entry, because a resumed run reads the entry and drops later entries
            if trainer.steps == steps or interrupt.asked:
                break
            started = time.perf_counter()
    if interrupt.asked:
        raise Interrupted(trainer.steps, checkpoint)
    return error


def describe(kernel: tuple[int, int] | None) -> str:
    """Return the name of the model with this kernel."""
    return "plain attention" if kernel is None else f"multi-token attention {kernel[0]} x {kernel[1]}"
