"""The server of examples/serve streams the tokens of ``generate``, refuses what is wrong, and can be measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("aiohttp")

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from test_batching import Configuration, alone, made, tokens

from examples.serve import measure, server

NEW = 6


def served(client: Any) -> Any:
    """Return what a coroutine function returns, given a session and the address of a server, and the model."""
    torch.set_num_threads(1)
    model = made()
    size = "page_size" if hasattr(Configuration, "page_size") else "block_size"  # in transformers 5.17
    config = Configuration(**{size: 8}, num_blocks=160, max_batch_tokens=24, use_cuda_graph=False)

    async def run() -> Any:
        async with TestServer(server.make_app(model, config)) as running, ClientSession() as session:
            return await client(session, str(running.make_url("")).rstrip("/"))

    return model, asyncio.run(run())


def test_tokens_are_streamed() -> None:
    prompts = [tokens(count, count) for count in (1, 9, 30)]

    async def client(session: ClientSession, url: str) -> list[Any]:
        async def ask(prompt: list[int]) -> list[Any]:
            async with session.post(f"{url}/generate", json={"tokens": prompt, "max_new_tokens": NEW}) as answer:
                assert answer.status == 200
                return [json.loads(line) async for line in answer.content]

        return await asyncio.gather(*map(ask, prompts))

    model, answers = served(client)
    for prompt, lines in zip(prompts, answers, strict=True):
        assert [line["token"] for line in lines] == alone(model, prompt)[:NEW]


WRONG = {
    "no object": ([1, 2], "the request must be a JSON object"),
    "nothing": ({}, "pass either text or tokens"),
    "text": ({"text": "a"}, "the checkpoint has no tokenizer"),
    "no tokens": ({"tokens": []}, "tokens must be integers from 0 to 96, at least one"),
    "unknown token": ({"tokens": [97]}, "tokens must be integers from 0 to 96"),
    "count": ({"tokens": [1], "max_new_tokens": 0}, "max_new_tokens must be from 1 to"),
}


def test_wrong_requests_are_refused() -> None:
    async def client(session: ClientSession, url: str) -> list[tuple[int, Any]]:
        answers = []
        for asked, _ in WRONG.values():
            async with session.post(f"{url}/generate", json=asked) as answer:
                answers.append((answer.status, await answer.json()))
        return answers

    _, answers = served(client)
    for (_, message), (status, answer) in zip(WRONG.values(), answers, strict=True):
        assert status == 400
        assert message in answer["error"]


def test_a_server_is_measured(tmp_path: Path) -> None:
    async def client(_: ClientSession, url: str) -> list[measure.Row]:
        return [await measure.measure(url, count, requests=3, prompt=5, new=4, vocabulary=90) for count in (1, 3)]

    _, rows = served(client)
    assert [row["clients"] for row in rows] == [1, 3]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["first_ms"] >= row["next_ms"] > 0
    measure.draw(rows, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
