"""The backend of PyTorch ops: multi-token attention in O(N) memory, for the CPU and any other device.

:mod:`.attention` computes operators that have at most a convolution before the softmax, block by
block. :mod:`.pipeline` computes other pipelines, windows and dropout in strips of rows.
:mod:`.packed` computes packed documents one by one. Arguments and results are those of
:mod:`.pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..documents import Documents
from ..dropout import Dropout
from ..spec import Spec
from . import attention, packed, pipeline

__all__ = ["backward", "decode", "forward"]


def forward(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    documents: Documents | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the forward pass: :func:`.pipeline.forward`, or :func:`.packed.forward` with
    documents.
    """
    if documents is not None:
        return packed.forward(_forward, spec, q, k, v, weights, scale, documents, dropout)
    return _forward(spec, q, k, v, weights, scale, dropout)


def backward(
    spec: Spec,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    documents: Documents | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, ...]:
    """Compute the backward pass: :func:`.pipeline.backward`. :func:`forward` returned out and lse."""
    if documents is not None:
        grads = grad_out, grad_lse
        return packed.backward(_backward, spec, *grads, q, k, v, weights, out, lse, scale, documents, dropout)
    return _backward(spec, grad_out, grad_lse, q, k, v, weights, out, lse, scale, dropout)


def decode(
    spec: Spec,
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    cache_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a decode step: :func:`.pipeline.decode`."""
    return pipeline.decode(spec, q_tail, k_cache, v_cache, weights, scale, cache_seqlens)


def _forward(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    dropout: Dropout | None,
    first_entry: int = 0,
) -> tuple[Tensor, Tensor]:
    if _by_blocks(spec) and dropout is None:
        return attention.forward(spec, q, k, v, _filters(q, weights), scale)
    return pipeline.forward(spec, q, k, v, weights, scale, dropout, first_entry)


def _backward(
    spec: Spec,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropout: Dropout | None,
    first_entry: int = 0,
) -> tuple[Tensor, ...]:
    if _by_blocks(spec) and dropout is None:
        filters = _filters(q, weights)
        grads = attention.backward(spec, grad_out, grad_lse, q, k, v, filters, out, lse, scale)
        return grads[: 3 + len(weights)]
    return pipeline.backward(spec, grad_out, grad_lse, q, k, v, weights, scale, dropout, first_entry)


def _by_blocks(spec: Spec) -> bool:
    return spec.convolves_only and spec.left is None and spec.right in (None, 0)


def _filters(q: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the filters of the convolution; those of plain attention have a single tap of 1."""
    return weights[0] if weights else q.new_ones(q.shape[1], 1, 1)
