"""Multi-token attention in the order of operations of its authors' layer, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BackendError, explain
from ..planner.geometry.mask import Mask
from ..spec import Spec


def authors_attention(spec: Spec) -> Callable[..., Tensor]:
    """Return the attention of the authors' layer, between its projections and its group norm.

    The layer is that of https://github.com/facebookresearch/RAM, ``projects/mta``, without dropout and with one
    document in a sequence. Its operations keep their order and dtypes: whole scores in the dtype of q, a grouped
    ``conv2d``, a linear layer over the head axis, a mask that is added, a softmax in fp32. Two of them are cheaper than
    there, so that the comparison is fair: the mask is not repeated for each head and sequence, and all groups of heads
    are mixed in one product, not in a loop. Groups before the softmax, which the layer does not have, are mixed like
    those after it.

    Args:
        spec: the operator.

    Returns:
        A differentiable function of q ``[B, H, Nq, D]``, k ``[B, Hkv, Nk, D]``, v ``[B, Hkv, Nk, DV]`` and the weights
        by name, as :func:`mtagen.reference` takes them; it returns out ``[B, H, Nq, DV]`` in the dtype of q.

    Raises:
        BackendError: the convolution's mask follows the output, or queries see a window, which the layer cannot do.
    """
    if Mask.of(spec).zeroes_terms:
        raise BackendError(explain("mask", spec.mask, "is not supported by the authors' code", ("source",)))

    if spec.window != (-1, -1):
        raise BackendError(explain("window", spec.window, "is not supported by the authors' code", (-1, -1)))

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
    ) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        nq, nk = scores.shape[-2:]
        hidden = torch.ones(nq, nk, dtype=torch.bool, device=q.device).triu(nk - nq + 1) if spec.causal else None
        if weight is not None:
            scores = _convolve(_clear(scores, hidden), weight, spec)
        if head_weight is not None:
            scores = _mix(scores, head_weight)
        if hidden is not None:
            scores = scores + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        shares = scores.float().softmax(-1).to(q.dtype)
        if post_weight is not None:
            shares = _clear(_convolve(_clear(shares, hidden), post_weight, spec), hidden)
        if post_head_weight is not None:
            shares = _mix(shares, post_head_weight)
        out: Tensor = shares @ v
        return out

    return attend


def _clear(x: Tensor, hidden: Tensor | None) -> Tensor:
    """Set scores to zero where a row must not see a key."""
    return x if hidden is None else x.masked_fill(hidden, 0)


def _convolve(x: Tensor, weight: Tensor, spec: Spec) -> Tensor:
    """Convolve each head with its own filter, ``[H, cq, ck]``."""
    padded = F.pad(x, (*spec.padding(weight.shape[-1]), weight.shape[-2] - 1, 0))
    return F.conv2d(padded, weight[:, None].to(x.dtype), groups=len(weight))


def _mix(x: Tensor, weight: Tensor) -> Tensor:
    """Mix the heads of each group by its matrix, ``[H/m, m, m]``; if all are in one group, by a
    linear layer.

    The authors index the matrices of groups [group, in head, out head], and that of the linear layer the other way.
    """
    weight = weight.to(x.dtype)
    if len(weight) == 1:
        return F.linear(x.transpose(1, -1), weight[0]).transpose(1, -1)
    grouped = torch.unflatten(x, 1, weight.shape[:2])
    return torch.einsum("bgcqk,gco->bgoqk", grouped, weight.mT).flatten(1, 2)
