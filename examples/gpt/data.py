"""Training data of a decoder: the bytes of a file, or the tokens of a folder that :mod:`.corpus` wrote."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtagen.errors import InputError, explain

from .model import BYTES

TRAIN, VALIDATION, TOKENIZER, ABOUT = "train.bin", "validation.bin", "tokenizer.json", "corpus.json"
WINDOW_SEED = 0  # seed of the choice of validation windows


@dataclass(frozen=True)
class Data:
    """Tokens, and the text that they stand for.

    Attributes:
        train: tokens to train on, int64.
        validation: tokens to validate on, int64; None: the training has no validation.
        token_bytes: number of bytes of text that each token of the vocabulary stands for.
        identity: a hash of all tokens.
        tokenizer: the tokenizer's file; None: tokens are bytes.
    """

    train: Tensor
    validation: Tensor | None
    token_bytes: Tensor
    identity: str
    tokenizer: Path | None = None

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return len(self.token_bytes)


def load_data(path: Path) -> Data:
    """Return the tokens of a corpus folder, or the bytes of a file as tokens.

    Raises:
        InputError: the folder lacks a file of a corpus, or a file does not fit the others.
    """
    if path.is_dir():
        return _load_corpus(path)
    content = path.read_bytes()
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long() if content else torch.empty(0).long()
    return Data(tokens, None, torch.ones(BYTES, dtype=torch.int64), hashlib.sha256(content).hexdigest())


def _load_corpus(folder: Path) -> Data:
    missing = [name for name in (TRAIN, VALIDATION, TOKENIZER) if not (folder / name).exists()]
    if missing:
        raise InputError(
            explain("corpus", str(folder), f"lacks {', '.join(missing)}", "a folder that examples.gpt.corpus wrote")
        )
    lengths = token_lengths(json.loads((folder / TOKENIZER).read_text(encoding="utf-8")))
    contents = [(folder / name).read_bytes() for name in (TRAIN, VALIDATION)]
    train, validation = map(decode_tokens, contents)
    for name, tokens in ((TRAIN, train), (VALIDATION, validation)):
        if len(tokens) and int(tokens.max()) >= len(lengths):
            got = f"token {int(tokens.max())}"
            raise InputError(explain(str(folder / name), got, f"is not in {TOKENIZER}", f"0..{len(lengths) - 1}"))
    return Data(train, validation, lengths, hashlib.sha256(b"".join(contents)).hexdigest(), folder / TOKENIZER)


def decode_tokens(content: bytes) -> Tensor:
    """Return the tokens of a ``.bin`` file as int64. The file holds unsigned little-endian integers of 16 bits."""
    if not content:
        return torch.empty(0, dtype=torch.int64)
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().view(-1, 2)
    return tokens[:, 0] + 256 * tokens[:, 1]


def encode_tokens(tokens: Any) -> bytes:
    """Return the content of a ``.bin`` file for an ``array`` of 16-bit tokens."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return bytes(tokens.tobytes())


def token_lengths(tokenizer: dict[str, Any]) -> Tensor:
    """Return the number of bytes that each token of a byte-level tokenizer stands for.

    A byte-level tokenizer spells each byte as one character. Special tokens, such as the end of a document, stand for
    0 bytes.

    Args:
        tokenizer: the content of ``tokenizer.json``.
    """
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    lengths = torch.zeros(1 + max(vocabulary.values()), dtype=torch.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)
    for added in tokenizer["added_tokens"]:
        if added["special"]:
            lengths[added["id"]] = 0
    return lengths


def validation_windows(tokens: Tensor, length: int, count: int) -> Tensor:
    """Return validation windows ``(count, length + 1)``, the same for all runs with these arguments.

    The first token of a window is only context. Each other token is in one window at most.

    Raises:
        InputError: the tokens have fewer windows than ``count``.
    """
    whole = max(0, len(tokens) - 1) // length
    if count > whole:
        rule = f"the {len(tokens)} validation tokens hold {whole} windows of {length} tokens"
        raise InputError(explain("windows", count, rule, f"1..{whole}" if whole else "a smaller length"))
    order = torch.randperm(whole, generator=torch.Generator().manual_seed(WINDOW_SEED))[:count]
    return tokens[order[:, None] * length + torch.arange(length + 1)]
