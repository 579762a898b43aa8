"""Rotary position embedding of interleaved pairs (Su et al., "RoFormer", arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * theta ** (-2 p / head_dim) for each pair p of a vector.

    Args:
        positions: ``(..., N)``, integers.
        head_dim: elements of a vector.
        theta: the base of the frequencies.
        dtype: of the vectors; angles are computed in fp32 at least.

    Returns:
        Two tensors ``(..., N, 1, head_dim / 2)``, to be broadcast over heads.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype).unsqueeze(-1) * (1 / theta**exponents)
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
        cu_seqlens: ``(documents + 1,)``, where each document begins, and ``total``.
        total: tokens of all documents.
    """
    tokens = torch.arange(total, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    return tokens - cu_seqlens[documents]
