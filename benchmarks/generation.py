"""Tokens per second that transformers' ``generate`` makes, by a Llama and by the same Llama with stages.

``python benchmarks/generation.py --help`` prints the options. Weights are random, and the search is
greedy. Stages start as the identity, so both models choose the same tokens, except where rounding
reorders two nearly equal logits. Each figure is the median of three calls after a first one, so it
includes no compilation. On a GPU static caches make ``generate`` compile its steps.
"""

from __future__ import annotations

import json
import statistics
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtagen.environment import collect
from mtagen.transformers import retrofit

VOCABULARY = 32000
REPEATS = 3


class Caches(Enum):
    """Which caches ``generate`` makes."""

    GROWS = "grows"
    STATIC = "static"


def llama(dim: int, layers: int, device: str) -> Any:
    """Return a Llama with four query heads per key head, of 128 elements or fewer, in bf16 on a GPU."""
    heads = max(dim // 128, 4)
    sizes = {"hidden_size": dim, "intermediate_size": 4 * dim, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=None, bos_token_id=None)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def measure(model: Any, prompt: Tensor, count: int, cache: Caches) -> tuple[Tensor, float]:
    """Return the new tokens of a call, and how many of them it made a second, the prompt's time included."""
    kind = None if cache is Caches.GROWS else cache.value
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "cache_implementation": kind}
    seconds = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        out = model.generate(prompt, **options)
        if out.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    new: Tensor = out[:, prompt.shape[1] :]
    return new, new.numel() / statistics.median(seconds[1:])


def main(
    dim: Annotated[int, typer.Option(help="Elements of a token's vector; the default is a model of 1.1B.")] = 2048,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 16,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", help="Sequences; repeat for more; default 1, 32.")
    ] = None,
    caches: Annotated[
        list[Caches] | None, typer.Option("--cache", help="Caches; repeat for more; default both.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    count: Annotated[int, typer.Option(help="New tokens.")] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file, too.")] = None,
) -> None:
    """Print tokens per second of both models, with caches that grow and with static ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = llama(dim, layers, device)
    models = {"Llama": theirs, "with (6, 11)": retrofit(theirs, kernel=(6, 11))}
    table = Table("model", "batch", "cache", "tokens/s", "of Llama's", "same tokens")
    results = []
    for batch in batches or [1, 32]:
        tokens = torch.randint(1, VOCABULARY, (batch, prompt), device=device)
        for cache in caches or Caches:
            expected, rate = measure(theirs, tokens, count, cache)
            for name, model in models.items():
                new, own = (expected, rate) if model is theirs else measure(model, tokens, count, cache)
                same = (new == expected).double().mean().item()
                results.append({"model": name, "batch": batch, "cache": cache.value, "tokens_per_s": own, "same": same})
                table.add_row(name, f"{batch}", f"{cache.value}", f"{own:.0f}", f"{own / rate:.2f}", f"{same:.0%}")
    Console().print(table)
    if json_file is not None:
        settings = {"dim": dim, "layers": layers, "prompt": prompt, "count": count}
        json_file.write_text(json.dumps({**settings, "environment": collect(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
