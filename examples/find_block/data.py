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
TEST_STREAM = 255  # training uses the streams below 255, one for each seed


@dataclass(frozen=True)
class Task:
    """Samples such as ``vqkze.hrpcs. ... .taobw#wavqk``: blocks, ``#``, two letters of a block, then this block.

    Each block has distinct letters, no two blocks are equal, and only the answer holds both of the two letters.
    The defaults are the task of Golovneva et al., "Multi-Token Attention", arXiv 2504.00927, section 4.1. Its samples
    have 319 characters.

    Attributes:
        letters: number of letters in the alphabet, at most 26.
        block_length: number of letters in a block.
        blocks: number of blocks in a sample.

    Raises:
        InputError: the alphabet has too few letters for such blocks, or too few blocks exist without the two letters.
    """

    letters: int = 26
    block_length: int = 5
    blocks: int = 52

    def __post_init__(self) -> None:
        if not 2 <= self.block_length <= self.letters <= 26:
            got = self.block_length, self.letters
            raise InputError(
                explain(
                    "block_length, letters", got, "a block has distinct letters", "2 <= block_length <= letters <= 26"
                )
            )
        others = perm(self.letters, self.block_length) - self.block_length * (self.block_length - 1) * perm(
            self.letters - 2, self.block_length - 2
        )
        if not 1 <= self.blocks <= others // 2:
            rule = f"only {others} blocks lack one of the two given letters, and a sample may use half of them"
            raise InputError(explain("blocks", self.blocks, rule, f"1..{others // 2}"))

    @property
    def vocabulary(self) -> int:
        """Number of different tokens: the letters, ``.`` and ``#``."""
        return self.letters + 2

    @property
    def prompt_length(self) -> int:
        """Number of characters before the answer."""
        return self.blocks * (self.block_length + 1) + 2

    @property
    def length(self) -> int:
        """Number of characters in a sample."""
        return self.prompt_length + self.block_length

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw samples and return their tokens ``(count, length)``, int64."""
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
        """Return the characters of a row of tokens."""
        characters = string.ascii_lowercase[: self.letters] + ".#"
        return "".join(characters[token] for token in tokens.tolist())


def _distinct(count: int, chosen: int, choices: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` rows of ``chosen`` distinct numbers below ``choices``, in random order.

    Each row holds the positions of the largest among ``choices`` random values.
    """
    return torch.rand(count, choices, generator=generator).topk(chosen).indices


def _hold_all(blocks: Tensor, pairs: Tensor) -> Tensor:
    """Return whether each block of ``(count, n, length)`` holds all letters of its row in ``pairs``: ``(count, n)``."""
    return (blocks.unsqueeze(3) == pairs[:, None, None]).any(2).all(2)


def _repeat(blocks: Tensor) -> Tensor:
    """Return whether each block of ``(count, n, length)`` equals an earlier block of its row: ``(count, n)``."""
    codes = (blocks * 26 ** torch.arange(blocks.shape[2])).sum(2)
    return (codes.unsqueeze(2) == codes.unsqueeze(1)).tril(-1).any(2)


class Batches(Dataset[Tensor]):
    """Batches of samples, ``(size, length)``, indexed by number.

    The number of a batch and the stream seed its random numbers. A resumed run and another model therefore get the
    same batches.

    Args:
        task: the task to sample.
        size: number of samples in a batch.
        stream: number of the random stream, 0..255. Different streams have different samples.
        samples: number of samples before the same batches come again; None: batches never repeat.

    Raises:
        InputError: the stream or the number of samples is not legal.
    """

    def __init__(self, task: Task, size: int, stream: int, samples: int | None = None) -> None:
        if not 0 <= stream <= TEST_STREAM:
            raise InputError(explain("stream", stream, "is out of range", f"0..{TEST_STREAM}"))
        if samples is not None and samples < size:
            raise InputError(explain("samples", samples, "must fill at least one batch", f"{size} or more"))
        self.task, self.size, self.stream = task, size, stream
        self.count = MAX_BATCHES if samples is None else samples // size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        seed = self.stream * MAX_BATCHES + number % self.count
        return self.task.sample(self.size, torch.Generator().manual_seed(seed))
