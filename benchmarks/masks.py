"""Time of ops with the option ``visible``, beside causal and full attention, on a GPU.

``python benchmarks/masks.py OUTPUT.json``: one sequence of 8192 tokens, 16 heads, bf16, forward and
backward, medians of calls in ms. ``seen`` is about the share of all scores that their query sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from triton.testing import do_bench

import mtagen
from mtagen.environment import collect

N, HEADS = 8192, 16
PREFIX = {"causal": False, "visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}}
DOCUMENTS = {"visible": "ids[b, i] == ids[b, j]", "parameters": {"ids": "b,i"}}
CHOSEN = "(blocks[b, i // 64, j // 64] == 1) | (i // 64 == j // 64)"
BLOCKS = {"visible": CHOSEN, "parameters": {"blocks": "b,i//64,j//64"}}
CAUSAL = 0.5 + 0.5 / N


def cases() -> Iterator[tuple[str, str, tuple[int, int] | None, int, dict[str, Any], dict[str, torch.Tensor], float]]:
    """Yield name, backend, kernel, head dim, options, parameters and the share of scores that is seen."""
    for kernel, d in (((6, 11), 64), ((6, 11), 128), (None, 64), (None, 128)):
        yield "causal", "cuda", kernel, d, {}, {}, CAUSAL
        yield "full", "cuda", kernel, d, {"causal": False}, {}, 1.0
        for n in (0, 2048, 4096, 8192):
            prefix = torch.tensor([n], device="cuda", dtype=torch.int32)
            yield f"prefix {n}", "cuda", kernel, d, PREFIX, {"prefix": prefix}, CAUSAL + n * (n - 1) / 2 / N**2
        yield "chunks of 1024", "cuda", kernel, d, {"visible": "i // 1024 == j // 1024"}, {}, 512 / N
    ids = (torch.arange(N, device="cuda", dtype=torch.int32) // 1024)[None]
    blocks = (torch.rand(1, N // 64, N // 64, device="cuda") < 1 / 8).int()
    yield "causal", "triton", None, 64, {}, {}, CAUSAL
    yield "window 511", "triton", None, 64, {"window": (511, 0)}, {}, 512 / N
    yield "4 sinks, window 511", "triton", None, 64, {"visible": "(j < 4) | (i - j < 512)"}, {}, 516 / N
    yield "8 documents by numbers", "triton", None, 64, DOCUMENTS, {"ids": ids}, 1 / 16
    chosen = blocks.tril(-1).float().mean().item() + 65 / (2 * N)
    yield "map of blocks, 1 in 8", "triton", None, 64, BLOCKS, {"blocks": blocks}, chosen


def measure(
    kernel: tuple[int, int] | None, d: int, backend: Any, options: dict[str, Any], parameters: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the times of both passes in ms."""
    q, k, v, grad = (torch.randn(1, HEADS, N, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weights = [torch.randn(HEADS, *kernel, device="cuda") / 8] if kernel else []
    inputs = [x.requires_grad_() for x in (q, k, v, *weights)]
    op = mtagen.build(kernel, d, backend=backend, **options)

    def call() -> torch.Tensor:
        return op(*inputs, parameters=parameters or None)

    with torch.no_grad():
        forward = do_bench(call, warmup=30, rep=120, return_mode="median")
    out = call()
    backward = do_bench(
        lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), warmup=30, rep=120, return_mode="median"
    )
    return forward, backward


def main(output: Path) -> None:
    """Measure all cases, and write them to a file, which has the cases so far if this is stopped."""
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    made = {"environment": collect(), "results": results}
    for name, backend, kernel, d, options, parameters, seen in cases():
        forward, backward = measure(kernel, d, backend, options, parameters)
        row = {"kernel": kernel, "head_dim": d, "mask": name, "backend": backend, "seen": seen}
        results.append(row | {"forward_ms": forward, "backward_ms": backward})
        print(results[-1], flush=True)
        output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
