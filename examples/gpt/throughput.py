"""Measure time and memory of a training step of the whole model: ``python -m examples.gpt.throughput --help``.

Tokens are random. The vocabulary is that of the authors' models, so that the output layer takes its real part of the
time. All contenders run the same code except for the attention. Compiled contenders compile the whole model with its
loss.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mtagen.environment import collect
from mtagen.measure.timing import issuing_us

from ..decoder import Decoder
from ..device import DEVICE, DeviceOption
from ..runs import publish_json
from .model import LLAMA3_VOCABULARY, SIZES, Size, count_parameters, make_decoder, next_token_loss
from .train import MAX_GRADIENT_NORM, make_optimizer, precision

EAGER = "plain", "mta", "authors"
CONTENDERS = (*EAGER, *(f"{name}-compiled" for name in EAGER))
WARMUP = 3
LAUNCHING_S = 2.0  # seconds in which the CPU's time is measured


def make_step(model: Decoder, batch: int, length: int, vocabulary: int, compiled: bool) -> Callable[[], None]:
    """Return a function that takes a training step on random tokens: forward, backward, clipping, AdamW."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, lr=1.5e-4)
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    loss_of = torch.compile(next_token_loss, fullgraph=True, dynamic=False) if compiled else next_token_loss

    def step() -> None:
        with precision(device):
            loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_steps(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each step.

    On a GPU the times are those from CUDA event to CUDA event, so that the CPU runs ahead as it does in training.
    """
    if device.type == "cpu":
        marks = [perf_counter()]
        for _ in range(steps):
            step()
            marks.append(perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def measure(
    size: Size, contender: str, batch: int, length: int, vocabulary: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """Measure the training step of one contender.

    Args:
        size: the size of the model.
        contender: one of :data:`CONTENDERS`.
        batch: sequences a step.
        length: tokens a sequence.
        vocabulary: number of tokens.
        steps: number of timed steps. Three steps that are not timed precede them.
        device: the device to measure.

    Returns:
        Milliseconds of a step (the median, and all of them), those that the CPU takes to launch one (the median; with
        waits, if a step fills the GPU's queue; None without a GPU), tokens a second, the peak of the GPU's memory in
        GiB (None without a GPU), the seconds before the first timed step (making the model included), and the number of
        parameters.

    Raises:
        torch.OutOfMemoryError: the step does not fit into the GPU's memory.
    """
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = perf_counter()
    with device:
        model = make_decoder(size, contender.removesuffix("-compiled"), vocabulary)
    step = make_step(model, batch, length, vocabulary, contender.endswith("-compiled"))
    for _ in range(WARMUP):
        step()
    if on_gpu:
        torch.cuda.synchronize(device)
    prepared = perf_counter() - start
    times = time_steps(step, steps, device)
    median = statistics.median(times)
    return {
        "ms": median,
        "all_ms": times,
        "cpu_ms": 1e-3 * statistics.median(issuing_us(step, device, burst=1, seconds=LAUNCHING_S)) if on_gpu else None,
        "tokens_per_s": 1e3 * batch * length / median,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        "prepared_s": prepared,
        "parameters": count_parameters(model),
    }


def measure_or_explain(size: Size, contender: str, **sizes: Any) -> dict[str, Any]:
    """Empty the GPU's memory, then return the result of :func:`measure`, or an ``error`` if memory does not suffice."""
    torch.compiler.reset()
    gc.collect()
    if sizes["device"].type == "cuda":
        torch.cuda.empty_cache()
    try:
        return measure(size, contender, **sizes)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def table(results: list[dict[str, Any]], title: str) -> Table:
    """Return the results as a table for the console."""
    shown = Table(title=title)
    shown.add_column("attention")
    for heading in ("ms a step", "CPU ms", "tokens/s", "peak GiB", "ready, s"):
        shown.add_column(heading, justify="right")
    for result in results:
        if "error" in result:
            shown.add_row(result["contender"], result["error"])
            continue
        cpu, peak = ("" if result[name] is None else f"{result[name]:,.1f}" for name in ("cpu_ms", "peak_gib"))
        speed, prepared = f"{result['tokens_per_s']:,.0f}", f"{result['prepared_s']:.0f}"
        shown.add_row(result["contender"], f"{result['ms']:,.1f}", cpu, speed, peak, prepared)
    return shown


def main(
    size: Annotated[str, typer.Option(help="Size of the model.", metavar="|".join(SIZES))] = "300M",
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Attention to measure; repeatable.", metavar="|".join(CONTENDERS), show_default="all"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    vocabulary: Annotated[int, typer.Option(min=1, help="Size of the vocabulary, in tokens.")] = LLAMA3_VOCABULARY,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps, after three warm-up steps.")] = 10,
    device: DeviceOption = DEVICE,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File to write the measurements to, as JSON.")
    ] = None,
) -> None:
    """Measure time and memory of a training step with each attention, one after the other in one process."""
    contenders = variant or list(CONTENDERS)
    for option, values, legal in (("--size", [size], SIZES), ("--variant", contenders, CONTENDERS)):
        for value in values:
            if value not in legal:
                raise typer.BadParameter(f"{value} is none of {', '.join(legal)}", param_hint=option)
    console = Console(stderr=True)
    sizes = {"batch": batch, "length": length, "vocabulary": vocabulary, "steps": steps}
    report: dict[str, Any] = {"environment": collect(), "device": str(device), "size": size, **sizes, "results": []}
    for contender in contenders:
        with console.status(f"{size}, {contender}"):
            result = measure_or_explain(SIZES[size], contender, **sizes, device=device)
        report["results"].append({"contender": contender, **result})
        if json_path is not None:  # after each contender, because a later one may take too long
            publish_json(json_path, report)
    title = f"{size}, {batch} sequences of {length} tokens, {device}"
    Console().print(table(report["results"], title))


if __name__ == "__main__":
    typer.run(main)
