"""Train multi-token attention and plain attention alike, and draw both: ``python -m examples.gpt.compare --help``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from ..device import DEVICE, DeviceOption
from ..runs import one_line
from .model import ATTENTION
from .plot import publish_comparison
from .train import (
    WINDOWS,
    BatchOption,
    CompileOption,
    LengthOption,
    LrOption,
    Run,
    Settings,
    SizeOption,
    StepsOption,
    ValidateEveryOption,
    WarmupOption,
    WindowsOption,
    check_choices,
)

VARIANTS = "plain", "mta"


def train_all(
    folder: Path,
    corpus: Path,
    settings: Settings,
    variants: list[str],
    seeds: int,
    *,
    device: torch.device,
    compiled: bool = False,
    windows: int = WINDOWS,
    validate_every: int | None = None,
    deadline: float = math.inf,
) -> bool:
    """Train each variant with each seed in its own folder, and continue the runs that the folders already have.

    Runs of one seed have the same batches in the same order. Runs of one variant share compiled code.

    Args:
        folder: the parent of the runs' folders, such as ``mta-0``.
        corpus: the folder of a corpus, see ``text`` of :class:`.train.Run`.
        settings: the settings of all runs, except variant and seed.
        variants: keys of :data:`.model.ATTENTION`.
        seeds: number of seeds. Seeds count from 0.
        device: see :class:`.train.Run`.
        compiled: see :class:`.train.Run`.
        windows: see :class:`.train.Run`.
        validate_every: see :meth:`.train.Run.train`.
        deadline: see :meth:`.train.Run.train`.

    Returns:
        Whether all runs are finished.
    """
    for seed in range(seeds):
        for variant in variants:
            if perf_counter() >= deadline:
                return False
            run = Run(
                replace(settings, variant=variant, seed=seed),
                folder / f"{variant}-{seed}",
                corpus,
                device,
                resume=True,
                compiled=compiled,
                windows=windows,
            )
            if run.step < settings.steps:
                typer.echo(f"{variant}, seed {seed}: training starts after step {run.step:,}", err=True)
                run.train(save_every=settings.steps, validate_every=validate_every, deadline=deadline)
            if run.step < settings.steps:
                return False
    return True


def main(
    folder: Annotated[
        Path, typer.Argument(help="Folder with a subfolder for each run; runs found there are continued.")
    ],
    corpus: Annotated[
        Path,
        typer.Option(help="Corpus to train on: a folder that examples.gpt.corpus wrote.", exists=True, file_okay=False),
    ],
    size: SizeOption = "30M",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention to train; repeatable.", metavar="|".join(ATTENTION), show_default=" and ".join(VARIANTS)
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each attention, with seeds 0, 1, ...")] = 2,
    steps: StepsOption = 500,
    batch: BatchOption = 16,
    length: LengthOption = 1024,
    lr: LrOption = 1e-3,
    warmup: WarmupOption = 50,
    device: DeviceOption = DEVICE,
    compiled: CompileOption = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after which to save and stop; run the same command to continue."),
    ] = None,
    validate_every: ValidateEveryOption = None,
    windows: WindowsOption = WINDOWS,
    results: Annotated[
        Path | None, typer.Option(help="Folder to write the picture, tables and logs to.", show_default="FOLDER")
    ] = None,
) -> None:
    """Train a decoder with each attention and each seed, validate it, and write a picture and tables of all runs."""
    deadline = perf_counter() + (math.inf if seconds is None else seconds)
    variants = variant or list(VARIANTS)
    for each in variants:
        check_choices(size, each, ATTENTION)
    settings = Settings(size, steps=steps, batch=batch, length=length, lr=lr, warmup=warmup)
    with one_line("compare"):
        finished = train_all(
            folder,
            corpus,
            settings,
            variants,
            seeds,
            device=device,
            compiled=compiled,
            windows=windows,
            validate_every=validate_every,
            deadline=deadline,
        )
        if finished:
            typer.echo(publish_comparison(folder, results or folder))
            return
    typer.echo(f"compare: stopped and saved after {seconds:g} seconds; run the same command to continue", err=True)
    raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
