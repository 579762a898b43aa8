"""Packed documents in the ``torch`` backend: each document is computed as a batch of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..call import Call, Documents
from ..spec import PARAMETER_SLOTS, SINK, Argument, Spec

_Results: TypeAlias = tuple[Tensor, ...]


def forward(run: Callable[..., _Results], spec: Spec, call: Call) -> tuple[Tensor, Tensor]:
    """Compute the outputs and log-sum-exps of all documents.

    Args:
        run: computes the forward pass of a batch. For dropout it takes the number of its first
            entry, which is that of a document here.
        spec: the operator.
        call: packed documents.

    Returns:
        ``out [total_q, H, DV]`` in ``q.dtype`` and ``lse [H, total_q]`` in fp32 (fp64 for fp64 inputs).
    """
    q = call.q
    out = q.new_zeros(*q.shape[:2], call.v.shape[2])
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for number, queries, keys in _each(call.documents):
        part, log_sums = run(spec, _document(spec, call, number, queries, keys), number)
        out[queries], lse[:, queries] = part[0].transpose(0, 1), log_sums[0]
    return out, lse


def backward(
    run: Callable[..., _Results],
    spec: Spec,
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
) -> _Results:
    """Compute the gradients of :func:`forward`, in the shapes and dtypes of q, k, v, the weights, the sink and the
    parameters; of shape (0,) for integers and constants.

    Args:
        run: computes the backward pass of a batch.
        grad_out: ``[total_q, H, DV]``, the gradient of out.
        grad_lse: ``[H, total_q]``, the gradient of lse.
        out, lse: the results of :func:`forward`; the other arguments are those of :func:`forward`.
    """
    summed = [*call.weights, *call.learned]
    dq, dk, dv = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    have_gradients = spec.have_gradients[3:]
    shapes = [x.shape if has else (0,) for x, has in zip(summed, have_gradients, strict=True)]
    sums = [torch.zeros(shape, dtype=dtype, device=x.device) for shape, x in zip(shapes, summed, strict=True)]
    for number, queries, keys in _each(call.documents):
        part_grad_out, part_out = _batch(queries, grad_out, out)
        part_grad_lse, part_lse = (x[None, :, queries] for x in (grad_lse, lse))
        rows = part_grad_out, part_grad_lse, part_out, part_lse
        grads = run(spec, _document(spec, call, number, queries, keys), *rows, number)
        for total, part_rows, part in zip((dq, dk, dv), (queries, keys, keys), grads, strict=False):
            total[part_rows] = part[0].transpose(0, 1)
        weights = len(call.weights)
        for total, part in zip(sums[:weights], grads[3:], strict=False):
            total += part
        described = zip(spec.packed_learned_arguments, sums[weights:], grads[3 + weights :], strict=True)
        for argument, total, part in described:
            if argument.differentiable:
                of_document = _learned(argument, total, number, keys)
                of_document += part
    return dq, dk, dv, *(total.to(x.dtype) for total, x in zip(sums, summed, strict=True))


def _each(documents: Documents | None) -> Iterator[tuple[int, slice, slice]]:
    """Yield the number, queries and keys of each document that has queries."""
    assert documents is not None, "the call is one of packed documents"
    ends = (cu_seq.tolist() for cu_seq in documents[:2])
    parts: Any = ([slice(*pair) for pair in pairwise(cu_seq)] for cu_seq in ends)
    for number, (queries, keys) in enumerate(zip(*parts, strict=True)):
        if queries.start < queries.stop:
            yield number, queries, keys


def _document(spec: Spec, call: Call, number: int, queries: slice, keys: slice) -> Call:
    """Return the call on one document, as a batch of one sequence."""
    (q,), (k, v) = _batch(queries, call.q), _batch(keys, call.k, call.v)
    given = zip(spec.packed_learned_arguments, call.learned, strict=True)
    learned = {argument.name: _learned(argument, x, number, keys) for argument, x in given}
    sink = learned.pop(SINK.name, None)
    slots: dict[str, Any] = dict(zip(PARAMETER_SLOTS, learned.values(), strict=False))
    return call._replace(q=q, k=k, v=v, sink=sink, **slots, cu_seq_q=None, cu_seq_k=None)


def _learned(argument: Argument, x: Tensor, number: int, keys: slice) -> Tensor:
    """Return the part of a sink or parameter that a document reads, in the shape for a batch of one, as a view."""
    first = argument.shape[0] if argument.shape else None
    if first == "total_k":
        return x[keys].movedim(0, -1).unsqueeze(0)
    return x[number : number + 1] if first == "documents" else x


def _batch(rows: slice, *tensors: Tensor) -> _Results:
    """Return the rows of one document as a batch of one sequence."""
    return tuple(x[rows].transpose(0, 1).unsqueeze(0) for x in tensors)
