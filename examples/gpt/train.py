"""Train the decoder on the bytes of a text or on a tokenized corpus: ``python -m examples.gpt.train --help``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from mtagen.errors import InputError, explain

from ..decoder import Decoder
from ..device import DEVICE, DeviceOption
from ..runs import (
    CHECKPOINT,
    LOG,
    Interrupt,
    Interrupted,
    Log,
    Stopwatch,
    check_settings,
    default_interval,
    environment,
    one_line,
    publish,
    publish_bytes,
    read_checkpoint,
)
from .data import TOKENIZER, load_data, validation_windows
from .model import ATTENTION, SIZES, count_parameters, make_decoder, next_token_loss

TEXT = Path(__file__).with_name("hamlet.txt")
MAX_GRADIENT_NORM = 1.0
WINDOWS = 128  # windows of a validation, by default


@dataclass(frozen=True)
class Settings:
    """Settings that determine the result of a run, besides the machine.

    The defaults of ``lr``, ``warmup`` and ``seed`` are the authors'.

    Attributes:
        size: a key of :data:`.model.SIZES`.
        variant: a key of :data:`.model.ATTENTION`.
        steps: number of steps of the optimizer. The learning rate falls to 0 at the last step.
        batch: sequences a step.
        length: tokens a sequence.
        lr: the largest learning rate.
        warmup: number of steps in which the learning rate rises.
        seed: seed of parameters and batches.
    """

    size: str = "tiny"
    variant: str = "mta"
    steps: int = 300
    batch: int = 4
    length: int = 256
    lr: float = 1.5e-4
    warmup: int = 375
    seed: int = 777


def precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of the computation: bf16 autocast on a GPU, the parameters' fp32 on the CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def make_optimizer(model: Decoder, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with the authors' options, the same for all parameters."""
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05, fused=fused)


def learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate of a step. Steps count from 1.

    The rate rises linearly from 0 to ``lr`` at the end of the warm-up, and falls linearly to 0 at the last step.
    """
    if step < settings.warmup:
        return settings.lr * step / settings.warmup
    return settings.lr * (settings.steps - step) / max(1, settings.steps - settings.warmup)


def sample(text: Tensor, settings: Settings, generator: torch.Generator) -> Tensor:
    """Return parts of the text ``(batch, length + 1)`` that begin at random positions."""
    starts = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=generator)
    return text[starts + torch.arange(settings.length + 1)]


class Run:
    """A training run in a folder. The folder holds a checkpoint, ``log.jsonl``, and the tokenizer of a corpus.

    The log begins with a line of settings, parameters and environment. A line for every logged step follows. Nothing is
    written before :meth:`train`, except that a resumed run drops the log's entries after its checkpoint.

    Args:
        settings: the settings of the run.
        folder: the folder of the run; made if absent.
        text: a file, whose bytes are tokens; or a folder of :mod:`.corpus`, which has a tokenizer and a validation set.
        device: the device to train on.
        resume: whether to continue from the folder's checkpoint, if the folder has one. On the CPU the run continues
            exactly as if it had not stopped.
        compiled: whether ``torch.compile`` compiles the model and its loss.
        windows: number of sequences that a validation takes, a multiple of the batch. The sequences are the same in all
            runs on a corpus.

    Raises:
        InputError: the folder has a run, and ``resume`` is not set or the run had other settings or another text; or
            the run's checkpoint or log is missing or damaged; or the text is too short; or ``windows`` is no multiple
            of the batch or exceeds the validation set.
    """

    quiet = False  # whether to show no progress

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        text: Path = TEXT,
        device: torch.device | str = DEVICE,
        *,
        resume: bool = False,
        compiled: bool = False,
        windows: int = WINDOWS,
    ) -> None:
        self.settings, self.folder, self.device = settings, folder, torch.device(device)
        self.data = load_data(text)
        # A hash, not a path, because the same text may have another path when a run is resumed.
        self.identity = asdict(settings) | {"text": self.data.identity}
        self.text, self.windows = self.data.train, None
        if len(self.text) <= settings.length:
            unit = "tokens" if self.data.tokenizer else "bytes"
            raise InputError(
                f"the text has {len(self.text)} {unit}, and a sequence needs {settings.length + 1}; "
                "pass a longer text, or a smaller length"
            )
        if self.data.validation is not None:
            if windows % settings.batch:
                rule, legal = "must be a multiple of the batch", f"a multiple of {settings.batch}"
                raise InputError(explain("windows", windows, rule, legal))
            self.windows = validation_windows(self.data.validation, settings.length, windows)
            self.identity["windows"] = windows
        self.log = Log(folder / LOG, "step", writes=not self.quiet)
        checkpoint = self._checkpoint()
        self.log.check_start(checkpoint, resume)
        torch.manual_seed(settings.seed)
        self.model = self._make_model()
        self.optimizer = make_optimizer(self.model, settings.lr)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.step = 0
        self.watch = Stopwatch(self.device)
        self.loss = next_token_loss
        if compiled:
            self._compile()
        self.saved: Path | None = checkpoint  # the checkpoint that holds this step
        if checkpoint:
            self._load(checkpoint)
            self.log.continue_at(self.step)

    def _make_model(self) -> Decoder:
        settings = self.settings
        return make_decoder(SIZES[settings.size], settings.variant, self.data.vocabulary).to(self.device)

    def _compile(self) -> None:
        """Compile the loss, and the model within it, with ``torch.compile``."""
        self.loss = torch.compile(self.loss)

    def _checkpoint(self) -> Path | None:
        """Return the checkpoint to continue from, or None if the folder has none."""
        path = self.folder / CHECKPOINT
        return path if path.exists() else None

    def _load(self, checkpoint: Path) -> None:
        state = read_checkpoint(checkpoint, "settings", "model", "optimizer", "generator", "step")
        check_settings(checkpoint, state["settings"], self.identity)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step = state["step"]
        self.watch.seconds = state.get("seconds", 0.0)  # earlier versions did not save it

    def save(self) -> Path:
        """Write a checkpoint, unless the last one holds this step. The last one stays until the new one is complete.

        Returns:
            The path of the checkpoint that holds this step.
        """
        if self.saved is None:
            with self.watch.paused():
                self.log.sync()
                self.saved = self._write()
        return self.saved

    def _write(self) -> Path:
        checkpoint = self.folder / CHECKPOINT
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self._progress() | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        publish(checkpoint, lambda file: torch.save(state, file))
        return checkpoint

    def _progress(self) -> dict[str, Any]:
        """Return the content of a checkpoint without the model and the optimizer."""
        settings = dict(self.identity)  # a copy, because torch.distributed.checkpoint overwrites the dict that it reads
        generator = self.generator.get_state()
        return {"settings": settings, "step": self.step, "generator": generator, "seconds": self.watch.seconds}

    def take_step(self) -> Tensor:
        """Take a step of the optimizer and return its loss, without waiting for the GPU."""
        self.step += 1
        self.saved = None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        tokens = sample(self.text, self.settings, self.generator)
        with precision(self.device):
            loss = self._loss_of(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss_of(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of a batch ``(B, length + 1)``. This process computes the whole batch."""
        loss: Tensor = self.loss(self.model, tokens.to(self.device, non_blocking=True))
        return loss

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the mean loss of the validation windows, in nats a token and in bits a byte of text.

        The watch is stopped during the validation.
        """
        assert self.windows is not None
        with self.watch.paused(), precision(self.device):
            parts = torch.split(self.windows, self.settings.batch)
            loss = self.reported(torch.stack([self._loss_of(part).detach() for part in parts]).double().mean())
            bytes_per_token = self.data.token_bytes[self.windows[:, 1:]].double().mean().item()
        return {"validation_loss": loss, "bits_per_byte": loss / bytes_per_token / math.log(2)}

    def _warm_up(self) -> None:
        """Compile the code of steps and validations, so that the time of no later step includes compiling."""
        assert self.windows is not None
        tokens = self.windows[: self.settings.batch]
        with precision(self.device):
            self._loss_of(tokens).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        with torch.no_grad(), precision(self.device):
            self._loss_of(tokens)

    def reported(self, loss: Tensor) -> float:
        """Return the loss of a step for the log. This waits until the step is finished."""
        return loss.item()

    def stops(self, interrupt: Interrupt) -> bool:
        """Return whether Ctrl-C ends the run after this step."""
        return interrupt.asked

    def train(
        self,
        until: int | None = None,
        log_every: int = 10,
        save_every: int | None = None,
        validate_every: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        """Train to a step, by default the last, and save.

        A killed run can resume from its last checkpoint. The first checkpoint is written before the first step. The
        seconds in the log are those of all steps so far. They exclude validations and checkpoints. With a validation
        set they also exclude compiling.

        Args:
            until: the step to stop after; None: the last step. A resumed run can continue from this step.
            log_every: number of steps between lines of the log.
            save_every: number of steps between checkpoints; None: a tenth of the run's steps, at most 1000.
            validate_every: number of steps between validations; None: a twentieth of the run's steps, at most 1000. The
                last step is validated, too.
            deadline: a time of ``time.perf_counter``. The run saves and returns after the first step that ends later.

        Raises:
            Interrupted: Ctrl-C was pressed. The steps until then are saved.
        """
        until = self.settings.steps if until is None else min(until, self.settings.steps)
        save_every = save_every or default_interval(self.settings.steps)
        if self.step >= until:
            if not self.quiet:
                typer.echo(f"already finished: the run has made {self.step:,} steps, of {until:,} requested", err=True)
            return
        if not self.step:
            self.save()  # before the log, because a log without a checkpoint cannot be resumed
            self.log.continue_at(0, [self._header()])
            if self.data.tokenizer and not self.quiet:
                publish_bytes(self.folder / TOKENIZER, self.data.tokenizer.read_bytes())
        if self.windows is not None:
            self._warm_up()
        columns = TextColumn("loss {task.fields[loss]:.3f}"), TextColumn("{task.fields[rate]:,.0f} tokens/s")
        console = Console(stderr=True, quiet=self.quiet)
        bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *columns, console=console)
        with bar, Interrupt(self.quiet) as interrupt:
            task = bar.add_task("training", total=until, completed=self.step, loss=float("nan"), rate=0)
            logged, before, stops = self.step, self.watch.seconds, False
            self.watch.start()
            while self.step < until and not stops and perf_counter() < deadline:
                loss = self.take_step()
                validates = self._validates(validate_every)
                if self.step % log_every == 0 or self.step == until or validates:
                    value = self.reported(loss)
                    with self.watch.paused() as seconds:
                        rate = (self.step - logged) * self.settings.batch * self.settings.length / (seconds - before)
                        lr = learning_rate(self.step, self.settings)
                        entry = {"step": self.step, "loss": value, "lr": lr, "tokens_per_s": rate, "seconds": seconds}
                        self.log.append(entry | (self.validate() if validates else {}))
                    bar.update(task, completed=self.step, loss=value, rate=rate)
                    logged, before = self.step, seconds
                stops = self.stops(interrupt)
                if self.step % save_every == 0:
                    self.save()
        self.watch.stop()
        saved = self.save()
        if stops:
            raise Interrupted(self.step, saved)

    def _header(self) -> dict[str, Any]:
        """Return the first line of the log."""
        return {
            "settings": self.identity,
            "parameters": count_parameters(self.model),
            "environment": environment(self.device),
        }

    def _validates(self, every: int | None) -> bool:
        """Return whether a validation follows this step."""
        if self.windows is None:
            return False
        every = every or max(1, min(1000, self.settings.steps // 20))
        return self.step % every == 0 or self.step == self.settings.steps


# Options that the training programs share.
SizeOption = Annotated[str, typer.Option(help="Size of the model.", metavar="|".join(SIZES))]
TextOption = Annotated[
    Path,
    typer.Option(
        help="Text file to train on, byte by byte.",
        exists=True,
        dir_okay=False,
        show_default=f"examples/gpt/{TEXT.name}",
    ),
]
WindowsOption = Annotated[
    int, typer.Option("--windows", min=1, help="Sequences per validation, a multiple of --batch.")
]
ValidateEveryOption = Annotated[
    int | None,
    typer.Option(min=1, help="Steps between validations.", show_default="a twentieth of --steps, at most 1000"),
]
StepsOption = Annotated[int, typer.Option(min=1, help="Total number of training steps.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences per step, all processes together.")]
LengthOption = Annotated[int, typer.Option(min=1, help="Tokens per sequence.")]
LrOption = Annotated[float, typer.Option(help="Largest learning rate, reached after the warm-up.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises to --lr.")]
SeedOption = Annotated[int, typer.Option(help="Seed of parameters and batches.")]
CompileOption = Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder, if there is one.")
]
UntilOption = Annotated[
    int | None, typer.Option(help="Step to save and stop after; --resume continues.", show_default="--steps")
]
LogEveryOption = Annotated[int, typer.Option(min=1, help="Steps between lines of the log.")]
SaveEveryOption = Annotated[
    int | None,
    typer.Option(min=1, help="Steps between checkpoints.", show_default="a tenth of --steps, at most 1000"),
]


def check_choices(size: str, variant: str, variants: Iterable[str]) -> None:
    """Check the values of ``--size`` and ``--variant``.

    Raises:
        typer.BadParameter: the size or the attention does not exist.
    """
    for option, value, legal in (("--size", size, SIZES), ("--variant", variant, variants)):
        if value not in legal:
            raise typer.BadParameter(f"{value} is none of {', '.join(legal)}", param_hint=option)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the checkpoint and the log; created if absent.")],
    size: SizeOption = Settings.size,
    variant: Annotated[
        str, typer.Option(help="Attention of the model.", metavar="|".join(ATTENTION))
    ] = Settings.variant,
    text: TextOption = TEXT,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Folder that examples.gpt.corpus wrote, to train on instead of --text.", exists=True, file_okay=False
        ),
    ] = None,
    steps: StepsOption = Settings.steps,
    batch: BatchOption = Settings.batch,
    length: LengthOption = Settings.length,
    lr: LrOption = Settings.lr,
    warmup: WarmupOption = Settings.warmup,
    seed: SeedOption = Settings.seed,
    device: DeviceOption = DEVICE,
    resume: ResumeOption = False,
    compiled: CompileOption = False,
    until: UntilOption = None,
    log_every: LogEveryOption = 10,
    save_every: SaveEveryOption = None,
    validate_every: ValidateEveryOption = None,
    windows: WindowsOption = WINDOWS,
) -> None:
    """Train a decoder on the bytes of a text, or on the tokens of a corpus, which has a validation set.

    The loss is in nats per token.
    """
    check_choices(size, variant, ATTENTION)
    settings = Settings(size, variant, steps, batch, length, lr, warmup, seed)
    with one_line("train"):
        run = Run(settings, folder, corpus or text, device, resume=resume, compiled=compiled, windows=windows)
        typer.echo(f"{count_parameters(run.model):,} parameters; training starts after step {run.step:,}")
        run.train(until, log_every, save_every, validate_every)


if __name__ == "__main__":
    typer.run(main)
