"""Continue a text with a trained decoder: ``python -m examples.gpt.generate --help``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from .model import SIZES, Decoder
from .train import DEVICE


class Continuation(NamedTuple):
    """What was generated, ``(B, count)``, and the seconds of the prompt and of the tokens after the first."""

    tokens: Tensor
    prompt_s: float
    tokens_s: float


def load(checkpoint: Path, device: torch.device) -> Decoder:
    """The model of a checkpoint of :mod:`.train`, on a GPU in bf16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    model = Decoder(SIZES[state["settings"]["size"]], state["settings"]["variant"])
    model.load_state_dict(state["model"])
    return model.to(device, dtype).eval()


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    count: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    step: Callable[..., Tensor] | None = None,
) -> Continuation:
    """Take the prompt at once, then token by token, with the layers' caches.

    Args:
        model: on the device of ``prompt``.
        prompt: ``(B, N)`` tokens.
        count: tokens to generate, 1 at least.
        temperature: logits are divided by it; 0: the likeliest token.
        generator: of the device, for sampling.
        step: computes the logits of a token instead of ``model``, e.g. ``torch.compile(model)``.
    """
    device = prompt.device
    caches = model.new_caches(len(prompt), prompt.shape[1] + count)
    start = _now(device)
    tokens = [_choose(model(prompt, caches)[:, -1], temperature, generator)]
    prompted = _now(device)
    if step is None:
        step = model
    else:  # a compiled step has one graph for all lengths if the device alone counts tokens from its first call on
        for cache in caches:
            cache.longest = None
    while len(tokens) < count:
        tokens.append(_choose(step(tokens[-1], caches)[:, -1], temperature, generator))
    return Continuation(torch.cat(tokens, 1), prompted - start, _now(device) - prompted)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """A token ``(B, 1)`` of each of ``(B, vocabulary)``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def main(
    folder: Annotated[Path, typer.Argument(help="Of a training run.", exists=True, file_okay=False)],
    prompt: Annotated[str, typer.Option(help="To be continued.")] = "LORD POLONIUS\n",
    count: Annotated[int, typer.Option(min=1, help="Bytes to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Of the choice; 0: the likeliest byte.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the choice, if the temperature is not 0.")] = 0,
    device: Annotated[str, typer.Option(help="Where.")] = DEVICE,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step from token to token.")] = False,
) -> None:
    """Continue a prompt, and say how many tokens a second that took."""
    place, checkpoint = torch.device(device), folder / "checkpoint.pt"
    if not checkpoint.exists():
        raise typer.BadParameter(f"there is no {checkpoint}", param_hint="folder")
    model = load(checkpoint, place)
    tokens = torch.tensor([list(prompt.encode())], device=place)
    step = torch.compile(model) if compiled else None
    generate(model, tokens, count, temperature, step=step)  # so that no kernel is compiled while the second is timed
    made = generate(model, tokens, count, temperature, torch.Generator(place).manual_seed(seed), step)
    typer.echo(prompt + bytes(made.tokens[0].tolist()).decode(errors="replace"))
    after = f", then {(count - 1) / made.tokens_s:,.0f} tokens/s" if count > 1 else ""
    typer.echo(f"prompt of {tokens.shape[1]} tokens: {1e3 * made.prompt_s:.1f} ms{after}", err=True)


if __name__ == "__main__":
    typer.run(main)
