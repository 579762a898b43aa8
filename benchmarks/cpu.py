"""Forward and backward on the CPU: the tiled backend against eager, the materialised reference with autograd.

Each contender runs in a process of its own. Its memory is by how much the peak resident size of that process
grows, counted from when the inputs are made and the libraries warmed up. Example:

    python benchmarks/cpu.py --json benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mtagen.environment import collect
from mtagen.naive import reference
from mtagen.ops import tiled
from mtagen.spec import Spec

Step = Callable[[], None]


def eager(spec: Spec, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, grad_out: Tensor) -> tuple[Step, Step]:
    """What to time: the forward pass alone, and forward with backward."""
    leaves = [x.requires_grad_() for x in (q, k, v, weight)]

    def forward() -> None:
        with torch.no_grad():
            reference(*leaves)

    def train() -> None:
        torch.autograd.grad(reference(*leaves), leaves, grad_out)

    return forward, train


def tiles(spec: Spec, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, grad_out: Tensor) -> tuple[Step, Step]:
    """As :func:`eager`, by the torch backend."""
    inputs, scale = (q, k, v, weight), q.shape[-1] ** -0.5

    def forward() -> None:
        tiled.forward(spec, *inputs, scale)

    def train() -> None:
        tiled.backward(spec, grad_out, None, *inputs, *tiled.forward(spec, *inputs, scale), scale)

    return forward, train


CONTENDERS = {"eager": eager, "tiled": tiles}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds and peak MiB of one contender, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    spec = Spec((args.cq, args.ck), args.dim, dtype="fp32")

    def make_steps(length: int) -> tuple[Step, Step]:
        q, k, v, grad_out = (torch.randn(args.batch, args.heads, length, args.dim) for _ in range(4))
        return CONTENDERS[args.contender](spec, q, k, v, torch.randn(args.heads, *spec.kernel), grad_out)

    make_steps(64)[1]()
    forward, train = make_steps(args.length)
    before = peak_mib()
    train()
    memory = peak_mib() - before
    return {
        "forward_ms": median_ms(forward, args.repeats),
        "forward_backward_ms": median_ms(train, args.repeats),
        "peak_mib": memory,
    }


def median_ms(step: Step, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def peak_mib() -> float:
    kib_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib_or_bytes / (2**20 if sys.platform == "darwin" else 2**10)


def measure_apart(contender: str) -> dict[str, float]:
    """Run :func:`measure` in a new process, with this one's arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], "--contender", contender]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def report(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    machine = collect()
    return {
        "config": {name: getattr(args, name) for name in ("batch", "heads", "length", "dim", "cq", "ck", "repeats")}
        | {"dtype": "fp32", "causal": True},
        "environment": {name: machine[name] for name in ("cpu", "torch", "python")}
        | {"threads": args.threads, "commit": commit.stdout.strip() or None},
        "results": {contender: measure_apart(contender) for contender in CONTENDERS},
    }


def print_table(results: dict[str, dict[str, float]]) -> None:
    table = Table("", "forward ms", "forward+backward ms", "peak MiB")
    for contender, row in results.items():
        table.add_row(contender, *(f"{x:.0f}" for x in row.values()))
    ratios = (a / b for a, b in zip(results["eager"].values(), results["tiled"].values(), strict=True))
    table.add_row("eager / tiled", *(f"{x:.1f}" for x in ratios))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("batch", 1),
        ("heads", 8),
        ("length", 2048),
        ("dim", 64),
        ("cq", 6),
        ("ck", 11),
        ("threads", 2),
        ("repeats", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--contender", choices=CONTENDERS, help="measure this one only, print JSON")
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(measure(args)))
        return
    outcome = report(args)
    print_table(outcome["results"])
    if args.json:
        args.json.write_text(json.dumps(outcome, indent=2) + "\n")


if __name__ == "__main__":
    main()
