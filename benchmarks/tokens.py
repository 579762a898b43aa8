"""Time of ops whose mixings depend on tokens, beside mixings by the same matrices for all tokens and eager PyTorch.

``python benchmarks/tokens.py OUTPUT.json``: four sequences of 2048 tokens, 16 heads of 64, bf16, all heads mixed before
and after the softmax, ranks of 2; medians of calls in ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from triton.testing import do_bench

import mtagen
from mtagen.environment import collect
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.measure.judge import eager_op

SIZES = Sizes(4, 16, 16, 2048, 2048)
MIXED: dict[str, Any] = {"kernel": None, "head_dim": 64, "mixed_heads": 16, "post_mixed_heads": 16, "dtype": "bf16"}
RANKS: dict[str, Any] = {"dynamic_ranks": (2, 2), "post_dynamic_ranks": (2, 2)}


def contenders() -> Iterator[tuple[str, Callable[..., Any], mtagen.Spec]]:
    """Yield names, ops and what they compute."""
    for backend in ("cuda", "triton"):
        for name, ranks in (("the same for all tokens", {}), ("of tokens", RANKS)):
            op = mtagen.build(**MIXED, **ranks, backend=backend)
            yield f"{backend}, {name}", op, op.plan.spec
    spec = mtagen.Spec(**MIXED, **RANKS)
    yield "eager, of tokens", eager_op(spec), spec


def main(output: Path) -> None:
    """Measure all contenders, and write their times to a file."""
    results = []
    for name, op, spec in contenders():
        sampler = Sampler.for_timing(spec, SIZES, torch.device("cuda"))
        named = {x: tensor.requires_grad_() for x, tensor in sampler.inputs().named.items()}
        grad, leaves = sampler.outputs(), [*named.values()]

        def both(op: Any = op, named: Any = named, leaves: Any = leaves, grad: Any = grad) -> None:
            torch.autograd.grad(op(**named), leaves, grad)

        with torch.no_grad():
            forward = do_bench(lambda op=op, named=named: op(**named), warmup=50, rep=200, return_mode="median")
        results.append({"name": name, "forward_ms": forward})
        results[-1]["forward_backward_ms"] = do_bench(both, warmup=50, rep=200, return_mode="median")
        print(results[-1], flush=True)
    output.write_text(json.dumps({"environment": collect(), "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
