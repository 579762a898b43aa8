"""Rotary position embedding of interleaved pairs (Su et al., "RoFormer", arXiv 2104.09864)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SpecError, explain
from .kernel_choice import has_kernels


@dataclass(frozen=True)
class FrequencyScaling:
    """Scaling of a rotary embedding's frequencies, for sequences longer than those of the training.

    With ``factor`` alone, all frequencies are divided by it (Chen et al., "Position Interpolation",
    arXiv 2306.15595; ``rope_type`` "linear" in transformers). With all four fields, only low
    frequencies are (Llama 3.1; "llama3" in transformers). A pair that turns at most
    ``low_freq_factor`` times within the original length has its frequency divided by ``factor``. A
    pair that turns at least ``high_freq_factor`` times keeps its frequency. Between the two, the
    result is interpolated linearly in the number of turns.

    Attributes:
        factor: divisor of the frequencies.
        low_freq_factor: up to this number of turns within the original length, a pair is slow.
        high_freq_factor: from this number of turns within the original length on, a pair is fast.
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
            names = "low_freq_factor, high_freq_factor and original_max_position_embeddings"
            rule = f"{names} go together, the first below the second"
            raise SpecError(explain("frequency_scaling", given, rule, "e.g. (1.0, 4.0, 8192), or all None"))

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies. A frequency is an angle in radians per position."""
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        if low is None or high is None or length is None:
            return frequencies / self.factor
        turns = frequencies * (length / (2 * math.pi))
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 0 for slow pairs, 1 for fast ones
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: FrequencyScaling | None, dtype: torch.dtype
) -> Tensor:
    """Return the angle position * theta ** (-2 p / head_dim) for each pair p of a vector.

    Args:
        positions: ``(..., N)``, integers.
        head_dim: elements of a vector.
        theta: the base of the frequencies.
        scaling: scaling of the frequencies, or None.
        dtype: dtype of the vectors.

    Returns:
        Radians ``(..., N, 1, head_dim / 2)`` in fp32 or fp64, to be broadcast over heads.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    frequencies = (theta**exponents).reciprocal()
    if scaling is not None:
        frequencies = scaling.scaled(frequencies)
    return positions.unsqueeze(-1).unsqueeze(-1) * frequencies


def rotate(angles: Tensor, *vectors: Tensor) -> list[Tensor]:
    """Rotate the pairs (x[2 p], x[2 p + 1]) of vectors ``(..., N, heads, head_dim)``.

    Args:
        angles: of :func:`rotation`. Products are computed in their dtype.
        *vectors: tensors of vectors; each result has the dtype of its tensor.
    """
    cos, sin = angles.cos(), angles.sin()
    if all(has_kernels(x, angles) for x in vectors):
        from .row_kernels import Rotation  # needs Triton

        return [Rotation.apply(x, cos, sin) for x in vectors]  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling():  # the compiler fuses real operations only
        of_pairs = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        return [_rotate(x, *of_pairs) for x in vectors]
    turns = torch.complex(cos, sin)
    return [_turn(x.to(angles.dtype).contiguous(), turns).to(x.dtype) for x in vectors]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors by two products: of each number with ``cos``, and of the other number of its pair with ``sin``.

    A compiler makes one kernel of these operations. For stacked pairs it makes two, and stores fp32 between them.
    """
    wide = x.to(cos.dtype)
    exchanged = torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2)
    return (wide * cos + exchanged * sin).to(x.dtype)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate vectors by one product of complex numbers, each of which is a pair."""
    pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def document_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return the positions ``(total,)`` of packed tokens, counted from the beginning of each
    document.

    Args:
        cu_seqlens: ``(documents + 1,)``, where each document begins, and where the last document
            ends. Positions of tokens after that end count from it.
        total: number of tokens, including those after the last document.
    """
    tokens = torch.arange(total, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return tokens - cu_seqlens[documents]
