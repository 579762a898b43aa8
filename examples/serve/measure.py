"""Measure a server's throughput and latency over clients: ``python -m examples.serve.measure --help``."""

from __future__ import annotations

import asyncio
import random
import statistics
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import matplotlib as mpl
import typer
from aiohttp import ClientSession
from rich.console import Console
from rich.table import Table

from mtagen.environment import collect

from ..runs import publish_json

mpl.use("agg")
from matplotlib import pyplot as plt

Row = dict[str, float]


async def ask(session: ClientSession, url: str, tokens: list[int], count: int) -> list[float]:
    """Return the seconds from the request to each new token.

    Raises:
        RuntimeError: the server answers with an error.
    """
    began, times = perf_counter(), []
    async with session.post(f"{url}/generate", json={"tokens": tokens, "max_new_tokens": count}) as response:
        async for line in response.content:
            if b'"error"' in line:
                raise RuntimeError(line.decode())
            times.append(perf_counter() - began)
    return times


async def measure(url: str, clients: int, requests: int, prompt: int, new: int, vocabulary: int) -> Row:
    """Let some clients ask at the same time, each its next request after the last answer.

    Returns:
        ``clients``; ``tokens_per_s`` of all; ``first_ms``, the median time to the first token; ``next_ms``, the median
        time between tokens.
    """
    drawn = random.Random(clients)
    prompts = [[drawn.randrange(vocabulary) for _ in range(prompt)] for _ in range(requests)]
    answers: list[list[float]] = []

    async def client(session: ClientSession) -> None:
        while prompts:
            answers.append(await ask(session, url, prompts.pop(), new))

    began = perf_counter()
    async with ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    seconds = perf_counter() - began
    gaps = [after - before for times in answers for before, after in pairwise(times)]
    return {
        "clients": clients,
        "tokens_per_s": sum(map(len, answers)) / seconds,
        "first_ms": 1e3 * statistics.median(times[0] for times in answers),
        "next_ms": 1e3 * statistics.median(gaps or [0.0]),
    }


def draw(rows: list[Row], path: Path) -> None:
    """Draw throughput and latency over the number of clients."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    clients = [row["clients"] for row in rows]
    left.plot(clients, [row["tokens_per_s"] for row in rows], marker="o")
    left.set(xlabel="clients", ylabel="new tokens per second")
    right.plot(clients, [row["first_ms"] for row in rows], marker="o", label="to the first token")
    right.plot(clients, [row["next_ms"] for row in rows], marker="s", label="between tokens")
    right.set(xlabel="clients", ylabel="ms, median", yscale="log")
    right.legend()
    left.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [f"{count:.0f}" for count in clients])
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("")
        axes.grid(alpha=0.3, which="both", axis="y")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    clients: Annotated[list[int] | None, typer.Option(help="Number of clients; repeatable.")] = None,
    requests: Annotated[int, typer.Option(help="Requests for each number of clients.")] = 64,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    new: Annotated[int, typer.Option(help="New tokens of an answer.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Tokens are drawn below this number.")] = 256,
    out: Annotated[Path, typer.Option(help="Folder for serving.json and serving.png.")] = Path("runs/serving"),
) -> None:
    """Measure a server that runs already, and draw the results."""
    rows = []
    for count in clients or [1, 2, 4, 8, 16]:
        rows.append(asyncio.run(measure(url, count, requests, prompt, new, vocabulary)))
    table = Table("clients", "new tokens/s", "first token, ms", "next token, ms")
    for row in rows:
        table.add_row(str(row["clients"]), *(f"{row[name]:.1f}" for name in ("tokens_per_s", "first_ms", "next_ms")))
    Console().print(table)
    out.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {"requests": requests, "prompt": prompt, "new": new}
    environment = {name: value for name, value in collect().items() if name != "cache_dir"}
    publish_json(out / "serving.json", {"environment": environment, **sizes, "rows": rows})
    draw(rows, out / "serving.png")


if __name__ == "__main__":
    typer.run(main)
