"""Which probabilities dropout keeps: a function of a seed and of a probability's place, in PyTorch ops.

Kernels draw the same (``templates/cuda/dropout.cuh``, ``templates/triton/dropout.j2``): for every 8 keys of a query,
Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes four words of 32 bits. Its key
and the last word of its counter are the seed; the other words of the counter are the number of the 8 keys, the query,
and b * H + h, for head h of batch entry, or packed document, b. Key j takes word j % 8 // 2, of this the lower half
where j is even, and of the half the lower 15 bits. It is dropped where these are less than p * 2**15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError, explain

RESOLUTION = 2**15  # of p
ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed, (2,) int64, from torch's generator of a device. It is drawn there, so that CUDA graphs replay it anew."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """The 15-bit numbers below it are dropped."""
    return round(p * RESOLUTION)


def dropout_mask(seed: Tensor, p: float, batch: int, heads: int, n_q: int, n_k: int) -> Tensor:
    """What a call with this seed and this p keeps.

    Args:
        seed: (2,) int64, as the op's ``dropout_seed``.
        p: the probability that an entry is dropped, 0 <= p < 1. It is rounded to a multiple of 2**-15.
        batch: batch entries, or packed documents.
        heads: heads of queries.
        n_q: queries; of packed documents those of the longest will do, as queries are counted in each.
        n_k: keys, likewise.

    Returns:
        (batch, heads, n_q, n_k) bool on the seed's device: True where a probability is kept.

    Raises:
        InputError: an argument is out of range.
    """
    check_dropout_p(p)
    check_seed(seed, seed.device if isinstance(seed, Tensor) else None)

    def count(n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int64, device=seed.device)

    slots, rows, groups = count(batch * heads)[:, None, None], count(n_q)[:, None], count((n_k + 7) // 8)
    first, second = seed[0], seed[1]
    key = [first & _WORD, (first >> 32 & _WORD) ^ (second >> 32 & _WORD)]
    shape = (batch * heads, n_q, len(groups))
    counter = [x.expand(shape) for x in (groups, rows, slots, second & _WORD)]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (_product(m, x) for m, x in zip(_MULTIPLIERS, counter[::2], strict=True))
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True)]
    words = torch.stack(counter, -1)
    halves = torch.stack([words, words >> 16], -1) & (RESOLUTION - 1)
    return (halves >= threshold(p)).view(batch, heads, n_q, -1)[..., :n_k]


def check_dropout_p(p: object) -> None:
    """Check a probability of dropout.

    Raises:
        InputError: it is none.
    """
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1 or threshold(p) == RESOLUTION:
        raise InputError(explain("dropout_p", p, "must be a probability less than 1", "0 <= dropout_p < 1"))


def check_seed(seed: object, device: torch.device | None) -> None:
    """Check a seed.

    Raises:
        InputError: it does not fit.
    """
    got = (tuple(seed.shape), seed.dtype, seed.device) if isinstance(seed, Tensor) else type(seed).__name__
    if got != ((2,), torch.int64, device):
        legal = f"shape (2,), torch.int64, {device}: mtagen.draw_seed(q.device)"
        raise InputError(explain("dropout_seed", got, "two words of 64 bits on q's device", legal))


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of a product of words; in 64 bits with a sign there is no room for the whole."""
    upper, lower = factor >> 16, factor & 0xFFFF
    return (upper * x + (lower * x >> 16)) >> 16 & _WORD, factor * x & _WORD
