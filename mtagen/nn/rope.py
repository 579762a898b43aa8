"""Rotary position embedding of interleaved pairs (Su et al., "RoFormer", arXiv 2104.09864)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SpecError, explain


@dataclass(frozen=True)
class FrequencyScaling:
    """How the frequencies of a rotary embedding are lowered for sequences longer than those of the training.

    By ``factor`` all of them (Chen et al., "Position Interpolation", arXiv 2306.15595; ``rope_type`` "linear" of
    transformers) or, where the other fields are given, those of slow pairs (Llama 3.1, "llama3" of transformers): a
    pair that turns at most ``low_freq_factor`` times within the original length has its frequency divided by
    ``factor``, one that turns at least ``high_freq_factor`` times keeps it, and between them the share that is kept
    grows linearly.

    Attributes:
        factor: what frequencies are divided by.
        low_freq_factor: turns within the original length up to which a pair is slow.
        high_freq_factor: turns from which on it is fast.
        original_max_position_embeddings: the original length, in tokens.

    Raises:
        SpecError: a number is not positive, or the last three are neither all given nor in order.
    """

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf) and (value is not None or name == "factor"):
                raise SpecError(explain(name, value, "must be a positive number", "e.g. 8.0"))
        given = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        low, high, length = given
        if given != (None, None, None) and (low is None or high is None or length is None or low >= high):
            rule = "low_freq_factor, high_freq_factor and original_max_position_embeddings go together, in order"
            raise SpecError(explain("frequency_scaling", given, rule, "e.g. (1.0, 4.0, 8192), or all None"))

    def scaled(self, frequencies: Tensor) -> Tensor:
        """What becomes of frequencies, angles of a step from one position to the next in radians."""
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        if low is None or high is None or length is None:
            return frequencies / self.factor
        turns = frequencies * (length / (2 * math.pi))
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: FrequencyScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * theta ** (-2 p / head_dim) for each pair p of a vector.

    Args:
        positions: ``(..., N)``, integers.
        head_dim: elements of a vector.
        theta: the base of the frequencies.
        scaling: what is done to the frequencies, if anything.
        dtype: of the vectors; angles are computed in fp32 at least.

    Returns:
        Two tensors ``(..., N, 1, head_dim / 2)``, to be broadcast over heads.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    frequencies = 1 / theta**exponents
    if scaling is not None:
        frequencies = scaling.scaled(frequencies)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[2 p], x[2 p + 1]) of vectors ``(..., N, heads, head_dim)`` by the angles of :func:`rotation`.

    The products are computed in the dtype of the cosines; the result has that of ``x``.
    """
    first, second = torch.unflatten(x.to(cos.dtype), -1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.flatten(-2).to(x.dtype)


def document_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """The positions ``(total,)`` of packed tokens, each counted from the first of its document.

    Args:
        cu_seqlens: ``(documents + 1,)``, where each document begins, and where the last one ends. Positions of tokens
            behind it count from there.
        total: tokens, those behind the last document included.
    """
    tokens = torch.arange(total, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    return tokens - cu_seqlens[documents]
