"""The task: among blocks of letters, find the one that holds two given letters, and spell it."""

from __future__ import annotations

import string
from dataclasses import dataclass
from math import perm

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mtagen.errors import InputError, explain

MAX_BATCHES = 1 << 24  # of a stream
TEST_STREAM = 255  # training has the streams below, one for each seed


@dataclass(frozen=True)
class Task:
    """Samples such as ``vqkze.hrpcs. ... .taobw#wavqk``: blocks, ``#``, two letters of a block, then that block.

    Each block has distinct letters, no two blocks are equal, and only the answer holds both letters that are asked for.
    Golovneva et al., "Multi-Token Attention", arXiv 2504.00927, section 4.1, with the defaults here: samples of 319
    characters.

    Attributes:
        letters: of the alphabet, at most 26.
        block_length: letters of a block.
        blocks: of a sample.

    Raises:
        InputError: there are not so many letters or blocks.
    """

    letters: int = 26
    block_length: int = 5
    blocks: int = 52

    def __post_init__(self) -> None:
        if not 2 <= self.block_length <= self.letters <= 26:
            got = self.block_length, self.letters
            raise InputError(explain("block_length, letters", got, "do not fit", "2 <= block_length <= letters <= 26"))
        others = perm(self.letters, self.block_length) - self.block_length * (self.block_length - 1) * perm(
            self.letters - 2, self.block_length - 2
        )
        if not 1 <= self.blocks <= others // 2:
            rule = "so many blocks without the two letters are not found by chance"
            raise InputError(explain("blocks", self.blocks, rule, f"1..{others // 2}"))

    @property
    def vocabulary(self) -> int:
        """Tokens: the letters, ``.`` and ``#``."""
        return self.letters + 2

    @property
    def prompt_length(self) -> int:
        """Characters before the answer."""
        return self.blocks * (self.block_length + 1) + 2

    @property
    def length(self) -> int:
        """Characters of a sample."""
        return self.prompt_length + self.block_length

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw samples, tokens ``(count, length)``, int64."""
        answers = self._draw(count, generator)
        pairs = answers.gather(1, _distinct(count, 2, self.block_length, generator))
        places = torch.randint(self.blocks, (count, 1), generator=generator)
        is_answer = torch.arange(self.blocks) == places
        blocks = self._draw(count * self.blocks, generator).view(count, self.blocks, -1)
        blocks[is_answer] = answers
        while (wrong := (_hold_all(blocks, pairs) | _repeat(blocks)) & ~is_answer).any():
            blocks[wrong] = self._draw(int(wrong.sum()), generator)

        separators = torch.full((count, self.blocks, 1), self.letters)
        separators[:, -1] = self.letters + 1
        context = torch.cat([blocks, separators], 2).flatten(1)
        return torch.cat([context, pairs, answers], 1)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        return _distinct(count, self.block_length, self.letters, generator)

    def text(self, tokens: Tensor) -> str:
        """The characters of a row of tokens."""
        characters = string.ascii_lowercase[: self.letters] + ".#"
        return "".join(characters[token] for token in tokens.tolist())


def _distinct(count: int, chosen: int, choices: int, generator: torch.Generator) -> Tensor:
    """Rows of ``chosen`` distinct numbers below ``choices``, in random order: the places of the largest values."""
    return torch.rand(count, choices, generator=generator).topk(chosen).indices


def _hold_all(blocks: Tensor, pairs: Tensor) -> Tensor:
    """Which blocks ``(count, n, length)`` hold all letters of their row of ``pairs``: ``(count, n)``."""
    return (blocks.unsqueeze(3) == pairs[:, None, None]).any(2).all(2)


def _repeat(blocks: Tensor) -> Tensor:
    """Which blocks ``(count, n, length)`` equal an earlier one of their row: ``(count, n)``."""
    codes = (blocks * 26 ** torch.arange(blocks.shape[2])).sum(2)
    return (codes.unsqueeze(2) == codes.unsqueeze(1)).tril(-1).any(2)


class Batches(Dataset[Tensor]):
    """Batches ``(size, length)`` of samples by their number, which with the stream is the seed of their random numbers.

    So a run that is resumed, and another model, get the same batches.

    Args:
        task: what is sampled.
        size: samples of a batch.
        stream: 0..255; other streams have other samples.
        samples: how many there are before they come again, in the same batches; None: they never do.

    Raises:
        InputError: the stream or the number of samples is not legal.
    """

    def __init__(self, task: Task, size: int, stream: int, samples: int | None = None) -> None:
        if not 0 <= stream <= TEST_STREAM:
            raise InputError(explain("stream", stream, "is out of range", f"0..{TEST_STREAM}"))
        if samples is not None and samples < size:
            raise InputError(explain("samples", samples, "are less than a batch", f"{size} or more"))
        self.task, self.size, self.stream = task, size, stream
        self.count = MAX_BATCHES if samples is None else samples // size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        seed = self.stream * MAX_BATCHES + number % self.count
        return self.task.sample(self.size, torch.Generator().manual_seed(seed))
