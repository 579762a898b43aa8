"""The backend of PyTorch ops: multi-token attention in O(N) memory, for the CPU and any other device.

:mod:`.attention` computes operators that have at most a convolution before the softmax, block by
block. :mod:`.pipeline` computes other pipelines, windows and dropout in strips of rows.
:mod:`.packed` computes packed documents one by one. Arguments and results are those of
:mod:`.pipeline`.
"""

from __future__ import annotations

from torch import Tensor

from ..call import Call, Step
from ..spec import Spec
from . import attention, packed, pipeline

__all__ = ["backward", "decode", "forward"]


def forward(spec: Spec, call: Call) -> tuple[Tensor, Tensor]:
    """Compute the forward pass: :func:`.pipeline.forward`, or :func:`.packed.forward` with
    documents.
    """
    return _forward(spec, call) if call.documents is None else packed.forward(_forward, spec, call)


def backward(
    spec: Spec, call: Call, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """Compute the backward pass: :func:`.pipeline.backward`. :func:`forward` returned out and lse."""
    rows = grad_out, grad_lse, out, lse
    return _backward(spec, call, *rows) if call.documents is None else packed.backward(_backward, spec, call, *rows)


def decode(spec: Spec, step: Step) -> tuple[Tensor, Tensor]:
    """Compute a decode step: :func:`.pipeline.decode`."""
    return pipeline.decode(spec, step)


def _forward(spec: Spec, call: Call, first_entry: int = 0) -> tuple[Tensor, Tensor]:
    if _by_blocks(spec, call):
        return attention.forward(spec, _with_filters(call))
    return pipeline.forward(spec, call, first_entry)


def _backward(
    spec: Spec, call: Call, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, first_entry: int = 0
) -> tuple[Tensor, ...]:
    if _by_blocks(spec, call):
        dq, dk, dv, dweight, *learned = attention.backward(spec, _with_filters(call), grad_out, grad_lse, out, lse)
        return dq, dk, dv, *((dweight,) if call.weights else ()), *learned
    return pipeline.backward(spec, call, grad_out, grad_lse, first_entry)


def _by_blocks(spec: Spec, call: Call) -> bool:
    if call.dropout is not None or not call.k.shape[2]:
        return False
    return spec.is_fusible and spec.visible is None and spec.left is None and spec.right in (None, 0)


def _with_filters(call: Call) -> Call:
    """Return the call with filters of a convolution; those of plain attention have a single tap of 1."""
    return call if call.weight is not None else call._replace(weight=call.q.new_ones(call.q.shape[1], 1, 1))
