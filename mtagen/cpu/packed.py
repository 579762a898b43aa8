"""Packed documents in the ``torch`` backend: each document is computed as a batch of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..documents import Documents
from ..dropout import Dropout
from ..spec import Spec

_Results: TypeAlias = tuple[Tensor, ...]


def forward(
    run: Callable[..., _Results],
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    documents: Documents,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and log-sum-exps of all documents.

    Args:
        run: computes the forward pass of a batch.
        spec: the operator.
        q: ``[total_q, H, D]``.
        k: ``[total_k, Hkv, D]``.
        v: ``[total_k, Hkv, DV]``.
        weights: as for a batch.
        scale: factor of q k^T.
        documents: boundaries of the documents.
        dropout: the call's dropout; it takes a document's number for that of a batch entry.

    Returns:
        ``out [total_q, H, DV]`` in ``q.dtype`` and ``lse [H, total_q]`` in fp32 (fp64 for fp64 inputs).
    """
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for number, queries, keys in _each(documents):
        part, log_sums = run(spec, *_batch(queries, q), *_batch(keys, k, v), weights, scale, dropout, number)
        out[queries], lse[:, queries] = part[0].transpose(0, 1), log_sums[0]
    return out, lse


def backward(
    run: Callable[..., _Results],
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
    documents: Documents,
    dropout: Dropout | None,
) -> _Results:
    """Compute the gradients of :func:`forward`, in the shapes and dtypes of q, k, v and the
    weights.

    Args:
        run: computes the backward pass of a batch.
        grad_out: ``[total_q, H, DV]``, the gradient of out.
        grad_lse: ``[H, total_q]``, the gradient of lse.
        out, lse: the results of :func:`forward`; the other arguments are those of :func:`forward`.
    """
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    sums = [torch.zeros(weight.shape, dtype=dtype, device=weight.device) for weight in weights]
    for number, queries, keys in _each(documents):
        part_grad_out, part_q, part_out = _batch(queries, grad_out, q, out)
        part_grad_lse, part_lse = (x[None, :, queries] for x in (grad_lse, lse))
        tensors = part_q, *_batch(keys, k, v), weights, part_out, part_lse
        grads = run(spec, part_grad_out, part_grad_lse, *tensors, scale, dropout, number)
        for total, rows, part in zip((dq, dk, dv), (queries, keys, keys), grads, strict=False):
            total[rows] = part[0].transpose(0, 1)
        for total, part in zip(sums, grads[3:], strict=True):
            total += part
    return dq, dk, dv, *(total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))


def _each(documents: Documents) -> Iterator[tuple[int, slice, slice]]:
    """Yield the number, queries and keys of each document that has queries and keys."""
    ends = (cu_seq.tolist() for cu_seq in documents[:2])
    parts: Any = ([slice(*pair) for pair in pairwise(cu_seq)] for cu_seq in ends)
    for number, (queries, keys) in enumerate(zip(*parts, strict=True)):
        if queries.start < queries.stop and keys.start < keys.stop:
            yield number, queries, keys


def _batch(rows: slice, *tensors: Tensor) -> _Results:
    """Return the rows of one document as a batch of one sequence."""
    return tuple(x[rows].transpose(0, 1).unsqueeze(0) for x in tensors)
