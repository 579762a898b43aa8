"""Answer requests over HTTP with transformers' continuous batching: ``python -m examples.serve.server --help``.

``POST /generate`` takes JSON with ``tokens``, or ``text`` if the checkpoint has a tokenizer, and ``max_new_tokens``.
The answer is a stream of JSON lines, one for each new token: ``{"token": 17}``, or ``{"token": 17, "text": " the"}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from aiohttp import web
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from mtagen.transformers import MtaForCausalLM

from ..device import DEVICE, DeviceOption

MODEL = web.AppKey("model", MtaForCausalLM)
MANAGER = web.AppKey("manager", object)
TOKENIZER = web.AppKey("tokenizer", object)
MOST_TOKENS = 4096  # new tokens of an answer


def make_app(model: MtaForCausalLM, config: ContinuousBatchingConfig, tokenizer: Any = None) -> web.Application:
    """Return the application that answers with a model's likeliest tokens.

    Args:
        model: the model, in evaluation mode.
        config: sizes of pages and steps.
        tokenizer: turns text into tokens and back; without it requests and answers have tokens.
    """
    app = web.Application()
    app[MODEL], app[TOKENIZER] = model, tokenizer
    end = model.generation_config.eos_token_id
    greedy = GenerationConfig(max_new_tokens=MOST_TOKENS, do_sample=False, eos_token_id=-1 if end is None else end)

    async def generating(app: web.Application) -> AsyncIterator[None]:
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        manager.start()
        app[MANAGER] = manager
        yield
        manager.stop(block=True)

    app.cleanup_ctx.append(generating)
    app.router.add_post("/generate", generate)
    return app


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    tokenizer: Any = request.app[TOKENIZER]
    try:
        tokens, count = _prompt(await request.json(), tokenizer, request.app[MODEL].config.vocab_size)
    except ValueError as error:
        return web.json_response({"error": str(error)}, status=400)
    manager: Any = request.app[MANAGER]
    outputs: asyncio.Queue[Any] = asyncio.Queue()
    name = f"{id(outputs)}-{asyncio.get_running_loop().time()}"
    manager.register_result_handler(name, outputs.put_nowait)
    manager.add_request(tokens, request_id=name, max_new_tokens=count, streaming=True)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    sent, finished = 0, False
    try:
        while not finished:
            output = await outputs.get()
            finished = output.is_finished()
            if output.error:
                await response.write(json.dumps({"error": output.error}).encode() + b"\n")
            for token in output.generated_tokens[sent:]:
                line = {"token": token} | ({} if tokenizer is None else {"text": tokenizer.decode([token])})
                await response.write(json.dumps(line).encode() + b"\n")
            sent = len(output.generated_tokens)
    except ConnectionResetError:
        manager.cancel_request(name)
        raise
    await response.write_eof()
    return response


def _prompt(asked: Any, tokenizer: Any, vocabulary: int) -> tuple[list[int], int]:
    """Return the prompt's tokens and the number of new tokens of a request.

    Raises:
        ValueError: the request is not legal.
    """
    if not isinstance(asked, dict):
        raise ValueError("the request must be a JSON object")
    if ("text" in asked) == ("tokens" in asked):
        raise ValueError("pass either text or tokens")
    if "text" in asked and tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer: pass tokens")
    tokens = tokenizer(asked["text"])["input_ids"] if "text" in asked else asked["tokens"]
    if not tokens or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise ValueError(f"tokens must be integers from 0 to {vocabulary - 1}, at least one")
    count = asked.get("max_new_tokens", 64)
    if type(count) is not int or not 1 <= count <= MOST_TOKENS:
        raise ValueError(f"max_new_tokens must be from 1 to {MOST_TOKENS}")
    return tokens, count


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that save_pretrained wrote.", exists=True)],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    page: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    pages: Annotated[int, typer.Option(help="Number of pages.")] = 1024,
    step: Annotated[int, typer.Option(help="New tokens of a step at most.")] = 512,
    device: DeviceOption = DEVICE,
) -> None:
    """Serve a checkpoint until it is interrupted."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = MtaForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    has_tokenizer = (checkpoint / "tokenizer_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint) if has_tokenizer else None
    config = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=step)
    web.run_app(make_app(model, config, tokenizer), host=host, port=port)


if __name__ == "__main__":
    typer.run(main)
