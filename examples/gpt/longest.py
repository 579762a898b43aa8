"""Measure training steps on long sequences: ``torchrun --nproc-per-node 2 -m examples.gpt.longest --help``.

Each training step is a step of :mod:`.train_distributed` on one sequence of random bytes that all ranks share.
"""

from __future__ import annotations

import os
import random
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from mtagen.environment import collect

from ..device import DEVICE
from ..runs import publish_json
from .train import CompileOption, Settings, SizeOption, check_choices
from .train_distributed import VARIANTS, DistributedRun

TEXT_BYTES = 2**22


def take_step(run: DistributedRun, length: int) -> dict[str, Any]:
    """Take a training step on a sequence of ``length`` tokens.

    Returns:
        ``length``; the seconds until the last rank has finished the step; the loss in nats a token; and the peak memory
        of a rank's tensors in GiB, the largest of all ranks, or None on a CPU.
    """
    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(run.device)
    run.settings = replace(run.settings, length=length)
    start = perf_counter()
    loss = run.reported(run.take_step())
    if on_gpu:
        torch.cuda.synchronize(run.device)
    peak = torch.cuda.max_memory_allocated(run.device) / 2**30 if on_gpu else 0.0
    slowest = torch.tensor([perf_counter() - start, peak], device=run.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds, peak = slowest.tolist()
    return {"length": length, "seconds": seconds, "loss": loss, "peak_gib": peak if on_gpu else None}


def filling(results: list[dict[str, Any]], gib: float, multiple: int) -> int:
    """Return the length whose step takes about ``gib`` GiB, rounded down to a multiple of ``multiple``.

    The length lies on a straight line through the peak memory of the last two steps.
    """
    (less, low), (more, high) = ((result["length"], result["peak_gib"]) for result in results[-2:])
    return int(more + (gib - high) * (more - less) / (high - low)) // multiple * multiple


def main(
    length: Annotated[
        list[int], typer.Option(min=1, help="Tokens of a sequence; repeatable. The first length warms up.")
    ],
    size: SizeOption = "300M",
    variant: Annotated[str, typer.Option(help="Attention of the model.", metavar="|".join(VARIANTS))] = "mta",
    fill: Annotated[
        float | None, typer.Option(min=0, help="GiB of GPU memory to fill with one more step on a longer sequence.")
    ] = None,
    compiled: CompileOption = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the measurements to, as JSON.")
    ] = None,
) -> None:
    """Measure a training step at each length. A step that does not fit into memory ends the program."""
    check_choices(size, variant, VARIANTS)
    if fill is not None and (DEVICE.type == "cpu" or len(length) < 2):
        raise typer.BadParameter("needs GPUs, and at least two values of --length", param_hint="--fill")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    ranks = dist.get_world_size()
    chunks = 2 * ranks
    if any(each % chunks for each in length):
        raise typer.BadParameter(
            f"must be a multiple of {chunks}, because {ranks} ranks cut a sequence into {chunks} equal chunks",
            param_hint="--length",
        )
    settings = Settings(size, variant, batch=1, length=chunks)
    command = f"torchrun --nproc-per-node {ranks} -m examples.gpt.longest {shlex.join(sys.argv[1:])}"
    report: dict[str, Any] = {"command": command, "environment": collect(), "ranks": ranks, "size": size}
    results: list[dict[str, Any]] = []
    report |= {"variant": variant, "compiled": compiled, "results": results}
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text"
        text.write_bytes(random.Random(0).randbytes(TEXT_BYTES))
        run = DistributedRun(settings, Path(name) / "run", text, context=ranks, compiled=compiled)
        lengths = list(length)
        while lengths:
            results.append(take_step(run, lengths.pop(0)))
            if dist.get_rank() == 0 and json_path is not None:  # after each step, because a later one may not fit
                publish_json(json_path, report)
            if not lengths and fill is not None:
                lengths, fill = [filling(results, fill, chunks)], None
    if dist.get_rank() == 0:
        table = Table("tokens", "s", "peak GiB", title=f"{size}, {variant}, {ranks} ranks, {DEVICE.type}")
        for result in results:
            peak = "" if result["peak_gib"] is None else f"{result['peak_gib']:.1f}"
            table.add_row(f"{result['length']:,}", f"{result['seconds']:.1f}", peak)
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
