"""Time attention over several ranks and compare it with one rank and with a model.

``torchrun --nproc-per-node 2 benchmarks/context_parallel.py --help`` prints the options. For each
length, the script times the forward and backward pass of one op in three ways:

- alone: the first rank computes the whole sequence
- over ranks: all ranks, by :class:`mtagen.distributed.ContextParallel`; GPUs are profiled too
- computed: each rank makes its own calls, without communication

:func:`mtagen.distributed.predict` predicts the time over ranks from the rates measured alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import mtagen
from mtagen.distributed import ContextParallel, Rates, predict
from mtagen.distributed.sharding import ChunkCall, Sharding
from mtagen.environment import collect
from mtagen.measure.cases import visible_pairs
from mtagen.spec import Spec

PIPELINES: dict[str, dict[str, Any]] = {
    "6,11": {"kernel": (6, 11)},
    "mix": {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16},
    "all": {"kernel": (6, 11), "mixed_heads": 16, "post_kernel": (6, 11), "post_mixed_heads": 16},
}
TIMES = "forward", "backward", "both"
WARMUP, ROUNDS = 2, 3
Outputs = list[tuple[Tensor, list[Tensor]]]  # each output with the tensors that get gradients


def tensors(spec: Spec, heads: int, kv_heads: int, rows: int, keys: int, device: torch.device) -> list[Tensor]:
    """Return random q, k and v of one sequence that require gradients."""
    made = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
    shapes = (heads, rows, spec.head_dim), (kv_heads, keys, spec.head_dim), (kv_heads, keys, spec.value_head_dim)
    return [torch.randn(1, *shape, **made).requires_grad_() for shape in shapes]


def timed(forward: Callable[[], Outputs], repeats: int, device: torch.device) -> list[tuple[float, float]]:
    """Return the milliseconds of each forward pass and its backward pass.

    The CPU runs ahead of the GPU, as it does in training.

    Args:
        forward: Computes the outputs.
        repeats: Number of timed repetitions; a few untimed ones come first.
        device: Device of the outputs.
    """
    on_gpu, marks = device.type == "cuda", []

    def mark() -> Any:
        if not on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks.append(mark())
    for _ in range(WARMUP + repeats):
        outs = forward()
        marks.append(mark())
        differentiate(outs)
        marks.append(mark())
    if on_gpu:
        torch.cuda.synchronize(device)
    times = [a.elapsed_time(b) if on_gpu else 1e3 * (b - a) for a, b in pairwise(marks)][2 * WARMUP :]
    return list(zip(times[::2], times[1::2], strict=True))


def differentiate(outs: Outputs) -> None:
    """Run the backward pass."""
    for out, leaves in outs:
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def activity(forward: Callable[[], Outputs], repeats: int) -> dict[str, Any]:
    """Profile both passes on the GPU with PyTorch's profiler.

    Returns:
        Milliseconds: ``kernels`` by name, the longest first; ``transfers``, while NCCL's kernels
        run; ``exposed``, the part of ``transfers`` while no other kernel runs.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(1 + repeats):  # ranks wait for each other's profiler in the first
            differentiate(forward())
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    totals: dict[str, float] = defaultdict(float)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events[len(events) // (1 + repeats) :]:
        name, span = re.split(r"[(<]", event.name.removeprefix("void "))[0], event.time_range
        totals[name] += span.end - span.start
        spans[name.startswith("nccl")].append((span.start, span.end))
    transfers, others, everything = (covered(each) for each in (spans[True], spans[False], spans[True] + spans[False]))
    scale = 1e-3 / repeats
    kernels = {name: scale * total for name, total in sorted(totals.items(), key=lambda each: -each[1])}
    return {"kernels": kernels, "transfers": scale * transfers, "exposed": scale * (everything - others)}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def slowest(times: list[tuple[float, float]], device: torch.device) -> dict[str, float]:
    """Return the medians of forward, backward and both passes, each on its slowest rank."""
    medians = [statistics.median(each) for each in (*zip(*times, strict=True), map(sum, times))] if times else [0.0] * 3
    longest = torch.tensor(medians, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return dict(zip(TIMES, longest.tolist(), strict=True))


def measure(
    op: mtagen.AttentionOp,
    heads: int,
    kv_heads: int,
    length: int,
    link: float,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """Measure one length: alone, over ranks, computed by ranks without transfers, and predicted."""
    spec, ranks, rank = op.plan.spec, dist.get_world_size(), dist.get_rank()
    weights = {
        name: torch.randn(shape, device=device).div_(shape[-1] * shape[-2]).requires_grad_()
        for name, shape in spec.weights(heads).items()
    }

    def attend(call: Callable[..., Any], qkv: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return call(*qkv, **weights), [*qkv, *weights.values()]

    whole = tensors(spec, heads, kv_heads, length, length, device) if rank == 0 else []
    own = tensors(spec, heads, kv_heads, length // ranks, length // ranks, device)
    cp = ContextParallel(op, dist.group.WORLD)
    calls = [ChunkCall.of(chunk, length, spec) for chunk in Sharding(length, ranks, balanced=True).held_by(rank)]
    parts = [tensors(spec, heads, kv_heads, call.queries.count, call.keys.count, device) for call in calls]
    contenders: dict[str, Callable[[], Outputs]] = {
        "alone": lambda: [attend(op, whole)],
        "spread": lambda: [attend(cp, own)],
        "computed": lambda: [attend(op, part) for part in parts],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):  # alternating, because clocks change as GPUs warm up
        for name, forward in contenders.items():
            if name != "alone" or rank == 0:
                times[name] += timed(forward, repeats, device)
            dist.barrier()
    profiled = activity(contenders["spread"], repeats) if device.type == "cuda" else None

    result: dict[str, Any] = {"length": length}
    result |= {f"{name}_ms": slowest(each, device) for name, each in times.items()}
    result["profile_ms"] = profiled
    result["speedup"] = result["alone_ms"]["both"] / result["spread_ms"]["both"]
    scores = heads * visible_pairs(length, length, spec.left, spec.right)
    rates = Rates(*(1e3 * scores / result["alone_ms"][name] for name in TIMES[:2]), link)
    predicted = predict(spec, rates, length=length, ranks=ranks, heads=heads, kv_heads=kv_heads)
    result["predicted_ms"] = {"forward": 1e3 * predicted.forward_s, "backward": 1e3 * predicted.backward_s}
    return result | {"predicted_speedup": predicted.speedup, "traffic_bytes": predicted.traffic}


def table(results: list[dict[str, Any]], title: str) -> Table:
    """Return the measurements as a table for the console."""
    shown = Table(title=title)
    for heading in ("N", "alone, ms", "over ranks, ms", "computed, ms", "exposed, ms", "speed-up", "predicted"):
        shown.add_column(heading, justify="right")
    for result in results:
        times = (f"{result[name]['both']:.1f}" for name in ("alone_ms", "spread_ms", "computed_ms"))
        exposed = "" if result["profile_ms"] is None else f"{result['profile_ms']['exposed']:.2f}"
        speedups = (f"{result[name]:.3f}" for name in ("speedup", "predicted_speedup"))
        shown.add_row(str(result["length"]), *times, exposed, *speedups)
    return shown


def main(
    length: Annotated[list[int], typer.Option(help="Length of the sequence; repeatable.")],
    pipeline: Annotated[
        str,
        typer.Option(
            help="6,11: convolution before the softmax; mix: 16 heads mixed before and after; all: both on each side.",
            metavar="|".join(PIPELINES),
        ),
    ] = "6,11",
    head_dim: Annotated[int, typer.Option(help="Head dim of queries, keys and values.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads of queries.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values.")] = 8,
    link: Annotated[float, typer.Option(help="GB/s that a rank receives, for the prediction.")] = 350,
    repeats: Annotated[int, typer.Option(min=1, help=f"Timed repetitions in each of {ROUNDS} rounds.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file.")] = None,
) -> None:
    """Time both passes of one op over all ranks.

    Each rank uses a GPU of its own in bf16, or the CPU in fp32 if no GPU is available.
    """
    if pipeline not in PIPELINES:
        raise typer.BadParameter(f"got {pipeline}; pass one of {', '.join(PIPELINES)}", param_hint="--pipeline")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    dtype = "bf16" if device.type == "cuda" else "fp32"
    op = mtagen.build(head_dim=head_dim, dtype=dtype, **PIPELINES[pipeline])
    options = {"pipeline": pipeline, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "link_gbps": link}
    command = f"torchrun --nproc-per-node {dist.get_world_size()} {shlex.join(sys.argv)}"
    report: dict[str, Any] = {"command": command, "environment": collect(), "ranks": dist.get_world_size(), **options}
    report["results"] = []
    for n in length:
        report["results"].append(measure(op, heads, kv_heads, n, 1e9 * link, repeats, device))
        if dist.get_rank() == 0 and json_path is not None:  # after each length, because a later one may fail
            json_path.write_text(json.dumps(report, indent=1) + "\n")
    if dist.get_rank() == 0:
        Console().print(table(report["results"], f"{pipeline}, d = {head_dim}, {report['ranks']} ranks, {device.type}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
