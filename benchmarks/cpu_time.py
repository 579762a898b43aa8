"""CPU time of calls of pipelines on a GPU, beside the time of the same launches in a CUDA graph.

``python benchmarks/cpu_time.py --help`` prints the options. ``cpu us`` is what the CPU takes to issue a call
to an idle GPU, in the median of all bursts; ``us`` is the time of a call by events; ``graph us`` is that of a
CUDA graph of the call. A ratio of 1 means that the CPU costs nothing. PyTorch runs backward passes in a thread of its
own for each GPU. ``in the calling thread`` is a pass without it (``torch.autograd.set_multithreading_enabled(False)``).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import mtagen
from mtagen.environment import collect
from mtagen.measure.timing import graph_ms, issuing_us, time_call

HEADS = 16
EVERYTHING = {"kernel": (6, 11), "mixed_heads": HEADS, "post_kernel": (6, 11), "post_mixed_heads": HEADS}
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "6,11": {"kernel": (6, 11)},
    "mix |": {"kernel": None, "mixed_heads": HEADS},
    "| mix": {"kernel": None, "post_mixed_heads": HEADS},
    "mix | mix": {"kernel": None, "mixed_heads": HEADS, "post_mixed_heads": HEADS},
    "6,11 | pairs": {"kernel": (6, 11), "post_mixed_heads": 2},
    "everything": EVERYTHING,
}
COLUMNS = ("cpu us", "us", "graph us", "ratio")


def calls(
    options: dict[str, Any], batch: int, n: int, head_dim: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each pass of an op and a call of it."""
    op = mtagen.build(head_dim=head_dim, **options)
    q, k, v, grad = torch.randn(4, batch, HEADS, n, head_dim, device="cuda", dtype=dtype).unbind()
    shapes = {name: weight.extents({"H": HEADS}) for name, weight in op.plan.spec.weight_arguments.items()}
    weights = {name: torch.randn(shape, device="cuda") / 8 for name, shape in shapes.items()}

    def leaves() -> list[torch.Tensor]:
        return [x.clone().requires_grad_() for x in (q, k, v, *weights.values())]

    def forward(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return op(*inputs[:3], **dict(zip(weights, inputs[3:], strict=True)))

    inputs, others = leaves(), leaves()  # a graph is not captured of tensors that another stream's graph has
    yield "forward", torch.no_grad()(lambda: forward(inputs))
    out = forward(inputs)
    passes = {
        "backward": lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        "forward+backward": lambda: torch.autograd.grad(forward(others), others, grad),
    }
    yield from passes.items()
    for name, call in passes.items():
        yield f"{name} in the calling thread", partial(in_calling_thread, call)


def in_calling_thread(call: Callable[[], object]) -> None:
    """Call a function whose backward pass gets no thread of its own."""
    with torch.autograd.set_multithreading_enabled(False):
        call()


def measure(call: Callable[[], object], in_graph: bool) -> dict[str, float]:
    """Return the microseconds of a call."""
    device = torch.device("cuda", torch.cuda.current_device())
    row = {"us": 1e3 * time_call(call, device).median, "cpu us": statistics.median(issuing_us(call, device))}
    if in_graph:
        row["graph us"] = 1e3 * graph_ms(call, device)
        row["ratio"] = row["us"] / row["graph us"]
    return row


def main(
    n: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Entries of a head.")] = 64,
    pipeline: Annotated[list[str] | None, typer.Option(help="Pipelines; default: all.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write results to this file.")] = None,
) -> None:
    """Print the CPU time of forward and backward calls of pipelines."""
    torch.manual_seed(0)
    table = Table("pipeline", "pass", *COLUMNS, title=f"N = {n}, B = {batch}, d = {head_dim}, {HEADS} heads, bf16")
    results = []
    for name in pipeline or PIPELINES:
        for pass_name, call in calls(PIPELINES[name], batch, n, head_dim, torch.bfloat16):
            # The launches of a backward pass alone go to the forward pass's stream, which is not captured.
            row = measure(call, in_graph=pass_name in ("forward", "forward+backward"))
            results.append({"pipeline": name, "pass": pass_name} | row)
            cells = [f"{row[column]:.{2 if column == 'ratio' else 0}f}" if column in row else "" for column in COLUMNS]
            table.add_row(name, pass_name, *cells)
    Console().print(table)
    if json_path:
        record = {"environment": collect(), "n": n, "batch": batch, "head_dim": head_dim, "results": results}
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
