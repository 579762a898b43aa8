"""CPU time of a call of a CUDA op without its kernels, on any machine.

``python benchmarks/call.py --help`` prints the options. Tensors are on the CPU and a launch does
nothing. A call on a GPU's host also launches, and asks PyTorch for the current device and stream.
Each figure is the shortest mean of all bursts, because other programs can only lengthen a burst.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from mtagen import Spec, plan
from mtagen.call import NO_LEARNED
from mtagen.codegen import render
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp
from mtagen.ops.executor import Executor
from mtagen.runtime.load import load, load_host
from mtagen.spec import WEIGHTS

SPEC, HEADS, ROWS = Spec((6, 11), 64), 16, 64
CALLS = 40  # calls in a burst


class NoKernel:
    """A stand-in for a loaded kernel that does nothing."""

    def __call__(self, grid: Sequence[int], *arguments: float) -> None:
        """Do nothing."""


def op_without_kernels() -> AttentionOp:
    """Return an op by the plan for an H200 whose launches do nothing."""
    planned = plan(SPEC, "sm_90a", "cuda")
    sources = render(planned)
    host = load_host(planned, sources, "forward")
    for name, kernels in host.KERNELS.items():
        host.LOADED[name][None] = dict.fromkeys(kernels, NoKernel())  # None: the index of a CPU
    executor = Executor(SPEC, load(planned, sources), kernels_on_cpu=True, torch_on_cpu=False)
    library.register("without kernels", executor)
    return AttentionOp(planned, "without kernels", (torch.bfloat16,))


def least_us(call: Callable[[], object], bursts: int) -> float:
    """Return the microseconds of a call: the shortest mean of a burst."""
    for _ in range(10 * CALLS):
        call()
    gc.collect()
    gc.disable()
    times = []
    for _ in range(bursts):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS)
    gc.enable()
    return 1e6 * min(times)


def main(bursts: Annotated[int, typer.Option(min=1, help=f"Number of bursts of {CALLS} calls.")] = 400) -> None:
    """Print the CPU time of a forward, backward and decode call that launches nothing."""
    torch.set_num_threads(1)
    op, options = op_without_kernels(), {"dtype": torch.bfloat16}
    q, k, v = (torch.zeros(1, HEADS, ROWS, SPEC.head_dim, **options) for _ in range(3))
    q_tail, weight = q[:, :, : SPEC.cq], torch.zeros(HEADS, *SPEC.kernel)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, weight)]
    out, lse = op(q, k, v, weight, return_lse=True)
    absent = (*(None,) * (len(WEIGHTS) - 1), *NO_LEARNED)
    arguments = (out, torch.zeros_like(lse), q, k, v, weight, *absent, out, lse, 1.0, "without kernels")
    table = Table("call", "us", title=f"{SPEC.kernel}, d = {SPEC.head_dim}, torch {torch.__version__}")
    for name, call in (
        ("forward", lambda: op(q, k, v, weight)),
        ("forward, with gradients", lambda: op(*leaves)),
        ("backward", lambda: library.run("backward", *arguments)),
        ("decode", lambda: op.decode(q_tail, k, v, weight)),
    ):
        table.add_row(name, f"{least_us(call, bursts):.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
