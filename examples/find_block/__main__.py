"""The command line: ``python -m examples.find_block train|demo|plot``. Run it with ``--help``."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from mtagen.errors import InputError, explain

from ..device import DEVICE, DeviceOption
from ..runs import LOG, Interrupted, one_line
from .data import Task
from .model import Size
from .train import Settings, describe
from .train import train as run


class _Group(TyperGroup):
    """Turn Ctrl-C and errors that a user can correct into one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        with one_line("find_block"):
            return super().invoke(ctx)


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

DEMO = Settings(
    Task(letters=16, block_length=3, blocks=10),
    Size(dim=32, layers=2, dropout=0),
    kernel=(2, 5),  # blocks of L letters have 2 L - 1 keys, as in the paper
    batch=32,
    lr=5e-3,
    warmup=50,
    samples=None,
    test_samples=500,
)
DEMO_STEPS = 2400

ResumeOption: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Continue from the checkpoint in the folder, if there is one.")
]


@app.command()
def train(
    folder: Annotated[Path, typer.Argument(help="Folder for the log and the checkpoint; created if absent.")],
    kernel: Annotated[
        str, typer.Option(help="Queries and keys of the filter; none: plain attention.", metavar="CQ,CK|none")
    ] = "2,9",
    steps: Annotated[int, typer.Option(min=1, help="Total number of training steps.")] = 100_000,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 1e-4,
    warmup: Annotated[int, typer.Option(min=1, help="Steps in which the learning rate rises to --lr.")] = 1000,
    samples: Annotated[
        int | None,
        typer.Option(help="Number of training samples before they repeat.", show_default="new samples in each step"),
    ] = None,
    test_samples: Annotated[int, typer.Option(min=1, help="Number of samples that the error is measured on.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of weights, samples and dropout, 0 to 254.")] = 0,
    letters: Annotated[int, typer.Option(help="Letters in the alphabet, at most 26.")] = 26,
    block_length: Annotated[int, typer.Option(help="Letters in a block, all distinct.")] = 5,
    blocks: Annotated[int, typer.Option(help="Blocks in a sample.")] = 52,
    dim: Annotated[int, typer.Option(help="Model width: elements of a token's vector.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads per layer.")] = 2,
    dropout: Annotated[float, typer.Option(help="Dropout probability of attention probabilities.")] = 0.1,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps between evaluations and checkpoints.", show_default="a tenth of --steps, at most 1000"
        ),
    ] = None,
    device: DeviceOption = DEVICE,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Launch each step as one CUDA graph; needs a GPU.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that draw samples; 0: the training process draws them.")
    ] = 2,
    resume: ResumeOption = False,
) -> None:
    """Train one model. The defaults are the paper's model and schedule, but with new samples in each step."""
    settings = Settings(
        Task(letters, block_length, blocks),
        Size(dim, layers, heads, dropout),
        _extents(kernel),
        batch,
        lr,
        warmup,
        samples,
        test_samples,
        seed,
    )
    error = run(
        settings,
        folder,
        steps,
        device=device,
        evaluate_every=evaluate_every,
        workers=workers,
        compile_model=compile_model,
        cuda_graph=cuda_graph,
        resume=resume,
    )
    typer.echo(f"{error:.1%} of {test_samples} blocks were not found")


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Folder for the picture, logs and checkpoints; created if absent.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = DEMO_STEPS,
    seed: Annotated[int, typer.Option(help="Seed of weights and samples, 0 to 254.")] = 0,
) -> None:
    """Train both kinds of attention on a small version of the task, on the CPU, in about two minutes.

    After Ctrl-C or a kill, the same command continues the training. After the training has ended, the same command
    shows the curves again.
    """
    import torch

    from .plot import plot as draw
    from .plot import sketch

    table = Table("model", "steps", "blocks not found", "seconds")
    logs = []
    for kernel in (None, DEMO.kernel):
        started = time.perf_counter()
        settings = replace(DEMO, kernel=kernel, seed=seed)
        where = folder / ("plain" if kernel is None else "mta")
        try:
            error = run(settings, where, steps, device=torch.device("cpu"), resume=True)
        except Interrupted as stop:
            raise Interrupted(stop.step, stop.checkpoint, "run the same command to continue") from None
        table.add_row(describe(kernel), str(steps), f"{error:.1%}", f"{time.perf_counter() - started:.0f}")
        logs.append(where / LOG)
    Console().print(table)
    typer.echo(sketch(logs))
    picture = folder / "error.png"
    try:
        draw(logs, picture)
        typer.echo(f"curves drawn to {picture}")
    except InputError as missing:  # without matplotlib the table and the sketch are still useful
        typer.echo(f"no picture: {missing}", err=True)


@app.command()
def plot(
    logs: Annotated[list[Path], typer.Argument(help=f"Logs to draw: {LOG} files, or the folders that hold them.")],
    out: Annotated[Path, typer.Option(help="File to draw to, .png or .svg.")],
) -> None:
    """Draw the test error of runs over their steps. This needs matplotlib: pip install mtagen\\[bench]."""
    from .plot import plot as draw

    draw([log / LOG if log.is_dir() else log for log in logs], out)


def _extents(kernel: str) -> tuple[int, int] | None:
    if kernel == "none":
        return None
    try:
        cq, ck = map(int, kernel.split(","))
    except ValueError:
        raise InputError(explain("kernel", kernel, "must be two integers", "CQ,CK, such as 2,9, or none")) from None
    return cq, ck


if __name__ == "__main__":
    app()
