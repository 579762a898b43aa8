"""The backend of PyTorch ops: multi-token attention in O(N) memory, for the CPU and any other device.

A convolution before the softmax alone is made tile by tile (:mod:`.attention`), other pipelines and windows by strips
of rows (:mod:`.pipeline`). Arguments and results are those of :mod:`.pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..spec import Spec
from . import attention, pipeline

__all__ = ["backward", "decode", "forward"]


def forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """See :func:`.pipeline.forward`."""
    if _by_tiles(spec):
        return attention.forward(spec, q, k, v, _kernels(q, weights), scale)
    return pipeline.forward(spec, q, k, v, weights, scale)


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
) -> tuple[Tensor, ...]:
    """See :func:`.pipeline.backward`; ``out`` and ``lse`` are what :func:`forward` returned."""
    if _by_tiles(spec):
        kernels = _kernels(q, weights)
        grads = attention.backward(spec, grad_out, grad_lse, q, k, v, kernels, out, lse, scale)
        return grads[: 3 + len(weights)]
    return pipeline.backward(spec, grad_out, grad_lse, q, k, v, weights, scale)


def decode(
    spec: Spec,
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    cache_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`.pipeline.decode`."""
    if _by_tiles(spec):
        return attention.decode(spec, q_tail, k_cache, v_cache, _kernels(q_tail, weights), scale, cache_seqlens)
    return pipeline.decode(spec, q_tail, k_cache, v_cache, weights, scale, cache_seqlens)


def _by_tiles(spec: Spec) -> bool:
    return spec.convolves_only and spec.left is None and spec.right in (None, 0)


def _kernels(q: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The kernels of a convolution; plain attention is one by a single tap of 1."""
    return weights[0] if weights else q.new_ones(q.shape[1], 1, 1)
