"""Dropout masks in PyTorch ops, from a seed and the place (head, query, key) of a probability.

Kernels compute the same masks (``templates/cuda/dropout.cuh``, ``templates/triton/dropout.j2``).
For every group of 16 keys of a query, Philox4x32-7 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011) makes four words of 32 bits. The seed gives Philox's key and the last word
of its counter. The other words of the counter are the number of the group, the query, and b * H +
h, where h is the head and b the batch entry or packed document.

A key is dropped if a 15-bit number is less than p * 2**15. The upper 7 bits of the number belong to
the key alone: they are the lower 7 bits of a byte. Key j of the group takes byte 2 (j % 2) + j // 8
of word j % 8 // 2. The lower 8 bits of the number are shared by all keys of the group: they are the
uppermost bits of the bytes of words 0 and 1, from the last byte to the first, word 0 before word 1.
So every key is dropped with the same probability, p to 15 bits, although only one byte is drawn for
it. In exchange, the keys of a group have a correlation of at most 2**-16 / (p (1 - p)).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InputError, explain
from .spec import DROPOUT_GROUP

RESOLUTION = 2**15  # p is rounded to a multiple of 1 / RESOLUTION
ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class Dropout(NamedTuple):
    """The dropout of one call.

    Attributes:
        seed: (2,) int64, which decides which entries are dropped.
        p: the probability that an entry is dropped.
    """

    seed: Tensor
    p: float

    def keep(self, heads: range, rows: range, keys: range) -> Tensor:
        """Return the mask of a block of probabilities, (heads, rows, keys) bool, True where kept.

        Heads are numbered b * H + h.
        """
        groups = range(keys.start // DROPOUT_GROUP, -(-keys.stop // DROPOUT_GROUP))
        counts = (torch.arange(x.start, x.stop, device=self.seed.device) for x in (heads, rows, groups))
        slots, queries, numbers = torch.meshgrid(*counts, indexing="ij")
        first, second = self.seed[0], self.seed[1]
        key = [first & _WORD, (first >> 32 ^ second >> 32) & _WORD]
        counter = [numbers, queries, slots & _WORD, (second & _WORD).expand(slots.shape)]
        for _ in range(ROUNDS):
            (high0, low0), (high1, low1) = (_product(m, x) for m, x in zip(_MULTIPLIERS, counter[::2], strict=True))
            counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
            key = [(word + step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True)]
        words = torch.stack(counter, -1)
        upper = torch.cat([torch.stack([words >> 8 * byte, words >> 8 * byte + 16], -1) for byte in (0, 1)], -2) & 127
        shared = torch.zeros_like(slots)
        for byte, word in itertools.product((3, 2, 1, 0), (0, 1)):
            shared = shared << 1 | words[..., word] >> 8 * byte + 7 & 1
        mask: Tensor = ((upper.flatten(-2) << 8 | shared[..., None]) >= threshold(self.p)).flatten(2)
        return mask[..., keys.start % DROPOUT_GROUP :][..., : len(keys)]


def draw_seed(device: torch.device | str) -> Tensor:
    """Draw a seed, (2,) int64, with torch's generator on ``device``.

    The seed is drawn on the device, so that each replay of a CUDA graph draws a new one.
    """
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """Return the threshold of ``p``: keys whose 15-bit number is below it are dropped."""
    return round(p * RESOLUTION)


def dropout_mask(seed: Tensor, p: float, batch: int, heads: int, n_q: int, n_k: int) -> Tensor:
    """Return the mask of the probabilities that a call with this seed and this p keeps.

    Args:
        seed: (2,) int64, the op's ``dropout_seed``.
        p: the probability that an entry is dropped, 0 <= p < 1. It is rounded to a multiple of 2**-15.
        batch: number of batch entries, or of packed documents.
        heads: number of query heads.
        n_q: number of queries. Queries and keys are counted from the beginning of their document,
            so the mask of a shorter document is a corner of this mask.
        n_k: number of keys.

    Returns:
        (batch, heads, n_q, n_k) bool on the seed's device: True where a probability is kept.

    Raises:
        InputError: p or seed does not fit.
    """
    check_dropout_p(p)
    check_seed(seed, seed.device if isinstance(seed, Tensor) else None)
    mask = Dropout(seed, p).keep(range(batch * heads), range(n_q), range(n_k))
    return mask.reshape(batch, heads, n_q, n_k)


def check_dropout_p(p: object) -> None:
    """Check a dropout probability.

    Raises:
        InputError: ``p`` is not a number in [0, 1), or rounds to 1.
    """
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1 or threshold(p) == RESOLUTION:
        raise InputError(explain("dropout_p", p, "must be a probability less than 1", "0 <= dropout_p < 1"))


def check_seed(seed: object, device: torch.device | None) -> None:
    """Check a dropout seed.

    Raises:
        InputError: the seed is not a (2,) int64 tensor on ``device``.
    """
    got = (tuple(seed.shape), seed.dtype, seed.device) if isinstance(seed, Tensor) else type(seed).__name__
    if got != ((2,), torch.int64, device):
        legal = f"shape (2,), torch.int64, {device}: mtagen.draw_seed(q.device)"
        raise InputError(explain("dropout_seed", got, "must be two 64-bit integers on q's device", legal))


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of a product that signed 64 bits cannot hold."""
    upper, lower = factor >> 16, factor & 0xFFFF
    return (upper * x + (lower * x >> 16)) >> 16 & _WORD, factor * x & _WORD
