"""Time score expressions, their parameters, and sinks: ``python benchmarks/expressions.py results.json``.

Each is compared with the same op without it, in the same process, and plain attention also with
compiled FlexAttention. Sequences are causal, bf16, with 16 heads. Times are medians of
``triton.testing.do_bench``, forward and backward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch._functorch.config
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

import mtagen
from mtagen.environment import collect
from mtagen.expressions import alibi, clipped, forget, softcap, t5, temperature

HEADS = 16
EXPRESSIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "softcap(50)": {"logits": softcap(50.0)},
    "alibi(16)": {"logits": alibi(HEADS)},
    "min(64, i - j) / 8": {"logits": "s + min(64, i - j) / 8"},
    "learned slopes": {"logits": "s - slopes[h] * (i - j)", "parameters": {"slopes": "h"}},
    "clipped(64)": {"logits": clipped(64), "parameters": {"table": "h,65"}},
    "t5()": {"logits": t5(), "parameters": {"table": "h,32"}},
    "forget()": {"logits": forget(), "parameters": {"gates": "b,h,j"}},
    "bias of keys": {"logits": "s + bias[b, h, j]", "parameters": {"bias": "b,h,j"}},
    "temperature()": {"logits": temperature(), "parameters": {"factors": "h"}},
    "sink": {"sink": True},
}


class Row(NamedTuple):
    """One case, and the milliseconds of its forward and backward pass."""

    kernel: str
    head_dim: int
    expression: str
    by: str
    forward_ms: float
    backward_ms: float


def score_mods(learned: dict[str, Tensor]) -> dict[str, Callable[..., Tensor]]:
    """The functions that FlexAttention has, too."""
    slope = 2.0 ** -(0.5 * (torch.arange(HEADS, device="cuda") + 1))
    return {
        "none": lambda s, b, h, i, j: s,
        "softcap(50)": lambda s, b, h, i, j: 50 * torch.tanh(s / 50),
        "alibi(16)": lambda s, b, h, i, j: s - slope[h] * (i - j),
        "min(64, i - j) / 8": lambda s, b, h, i, j: s + torch.clamp(i - j, max=64) / 8,
        "learned slopes": lambda s, b, h, i, j: s - learned["slopes"][h] * (i - j),
        "clipped(64)": lambda s, b, h, i, j: s + learned["table"][h, torch.clamp(i - j, 0, 64)],
        "bias of keys": lambda s, b, h, i, j: s + learned["bias"][b, h, j],
        "temperature()": lambda s, b, h, i, j: s * learned["factors"][h],
    }


def times(call: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward pass."""
    measure = partial(do_bench, warmup=50, rep=200, return_mode="median")
    out = call()
    grad = torch.randn_like(out)
    return measure(call), measure(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


def rows_of(name: str, kernel: str, qkv: list[Tensor], backends: list[str], flex: bool) -> Iterator[Row]:
    """Time an expression by each backend, and by FlexAttention where it has it."""
    extents = None if kernel == "none" else tuple(map(int, kernel.split(",")))
    length, head_dim = qkv[0].shape[2:]
    generator = torch.Generator("cuda").manual_seed(1)
    parameters: dict[str, Tensor] = {}
    for backend in backends:
        op = mtagen.build(extents, head_dim, backend=backend, dtype="bf16", **EXPRESSIONS[name])
        spec, sizes = op.plan.spec, {"B": 1, "H": HEADS, "Nk": length}
        learned = {}
        for argument in (*spec.weight_arguments.values(), *spec.learned_arguments):
            x = torch.randn(argument.extents(sizes), device="cuda", generator=generator) / 16
            learned[argument.name] = x.requires_grad_()
        parameters = {parameter: learned[parameter] for parameter, _ in spec.parameters}
        others = {other: x for other, x in learned.items() if other not in parameters}
        call = partial(op, *qkv, **others, parameters=parameters or None)
        yield Row(kernel, head_dim, name, backend, *times(call, [*qkv, *learned.values()]))
    mods = score_mods(parameters)
    if flex and extents is None and name in mods:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
        attend = partial(torch.compile(flex_attention), *qkv, score_mod=mods[name], block_mask=mask)
        try:
            yield Row(kernel, head_dim, name, "FlexAttention", *times(attend, [*qkv, *parameters.values()]))
        except RuntimeError as error:  # some backward passes do not compile
            typer.echo(f"FlexAttention, {name}: {str(error).splitlines()[0]}")


def main(
    path: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)],
    length: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 8192,
    kernels: Annotated[str, typer.Option(help="Filters, separated by spaces.")] = "6,11 none",
    head_dims: Annotated[str, typer.Option(help="Head dims, separated by spaces.")] = "128 64",
    backends: Annotated[str, typer.Option(help="Backends, separated by spaces.")] = "auto",
    only: Annotated[str, typer.Option(help="Names of expressions, separated by semicolons.")] = "",
    flex: Annotated[bool, typer.Option("--flex/--no-flex", help="Time FlexAttention, too.")] = True,
) -> None:
    """Time the expressions on the current GPU."""
    torch._dynamo.config.cache_size_limit = 1000  # each expression is compiled
    torch._functorch.config.donated_buffer = False  # FlexAttention's backward pass is called more than once
    rows: list[Row] = []
    for kernel in kernels.split():
        for head_dim in map(int, head_dims.split()):
            drawn = torch.randn(3, 1, HEADS, length, head_dim, device="cuda").bfloat16()
            qkv = [x.contiguous().requires_grad_() for x in drawn]
            for name in EXPRESSIONS:
                if not only or name in ("none", *only.split(";")):
                    for row in rows_of(name, kernel, qkv, backends.split(), flex):
                        typer.echo(row)
                        rows.append(row)
                        _write(path, length, rows)
    none = {(row.kernel, row.head_dim, row.by): row for row in rows if row.expression == "none"}
    table = Table("kernel", "d", "expression", "by", "forward ms", "backward ms", "of none")
    for row in rows:
        base = none[row.kernel, row.head_dim, row.by]
        ratios = f"{row.forward_ms / base.forward_ms:.2f} {row.backward_ms / base.backward_ms:.2f}"
        table.add_row(*map(str, row[:4]), f"{row.forward_ms:.3f}", f"{row.backward_ms:.3f}", ratios)
    Console(width=110).print(table)


def _write(path: Path, length: int, rows: list[Row]) -> None:
    found = {"environment": collect(), "length": length, "rows": [row._asdict() for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
