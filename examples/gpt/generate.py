"""Continue a text with a trained decoder: ``python -m examples.gpt.generate --help``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from mtagen.errors import InputError, explain

from ..decoder import Decoder, generate, likeliest
from ..device import DEVICE, DeviceOption
from ..runs import CHECKPOINT, one_line, read_checkpoint
from .data import TOKENIZER
from .model import SIZES, make_decoder


class Continuation(NamedTuple):
    """Generated tokens ``(B, count)`` and two times in seconds: of the prompt, and of all tokens after the first."""

    tokens: Tensor
    prompt_s: float
    tokens_s: float


def load(checkpoint: Path, device: torch.device) -> Decoder:
    """Return the model of a checkpoint of :mod:`.train`, in bf16 on a GPU and in fp32 on a CPU.

    Raises:
        InputError: the checkpoint cannot be read, or holds no model.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    state = read_checkpoint(checkpoint, "settings", "model")
    vocabulary = len(state["model"]["tok_embeddings.weight"])
    model = make_decoder(SIZES[state["settings"]["size"]], state["settings"]["variant"], vocabulary)
    model.load_state_dict(state["model"])
    return model.to(device, dtype).eval()


def continued(
    model: Decoder,
    prompt: Tensor,
    count: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    step: Callable[..., Tensor] | None = None,
) -> Continuation:
    """Generate tokens, and time the generation.

    Args:
        model: the decoder, on the device of ``prompt``.
        prompt: ``(B, N)`` tokens.
        count: number of tokens to generate, at least 1.
        temperature: divisor of the logits before sampling; 0: always take the most probable token.
        generator: the generator for sampling, on the device of ``prompt``.
        step: see :func:`examples.decoder.generate`.
    """

    def sample(logits: Tensor) -> Tensor:
        return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)

    device = prompt.device
    start = _now(device)
    following = generate(model, prompt, count, sample if temperature else likeliest, step)
    first = next(following)
    prompted = _now(device)
    tokens = torch.cat([first, *following], 1)
    return Continuation(tokens, prompted - start, _now(device) - prompted)


def read_codec(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Return the functions that encode text to a run's tokens and decode tokens to text.

    Tokens are those of the run's tokenizer, or bytes if the run has no tokenizer.

    Raises:
        InputError: the run has a tokenizer, and the package ``tokenizers`` is absent.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
    try:
        from tokenizers import Tokenizer  # of the extra `transformers`
    except ImportError as error:
        remedy = "pip install tokenizers"
        raise InputError(explain("tokenizer", str(path), "needs the package tokenizers", remedy)) from error
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text).ids, lambda tokens: tokenizer.decode(tokens)


def _now(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a training run.", exists=True, file_okay=False)],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "LORD POLONIUS\n",
    count: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0: always the most probable token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling; unused at temperature 0.")] = 0,
    device: DeviceOption = DEVICE,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the generation of each token with torch.compile.")
    ] = False,
) -> None:
    """Continue a prompt, and report the speed in tokens per second."""
    checkpoint = folder / CHECKPOINT
    if not checkpoint.exists():
        raise typer.BadParameter(f"there is no {checkpoint}; pass the folder of a training run", param_hint="folder")
    if not prompt:
        raise typer.BadParameter("is empty, so there is nothing to continue", param_hint="--prompt")
    with one_line("generate"):
        model = load(checkpoint, device)
        encode, decode = read_codec(folder)
    tokens = torch.tensor([encode(prompt)], device=device)
    step = torch.compile(model) if compiled else None
    continued(model, tokens, count, temperature, step=step)  # compiles all kernels before the timed generation
    made = continued(model, tokens, count, temperature, torch.Generator(device).manual_seed(seed), step)
    typer.echo(prompt + decode(made.tokens[0].tolist()))
    after = f", then {(count - 1) / made.tokens_s:,.0f} tokens/s" if count > 1 else ""
    typer.echo(f"prompt of {tokens.shape[1]} tokens: {1e3 * made.prompt_s:.1f} ms{after}", err=True)


if __name__ == "__main__":
    typer.run(main)
