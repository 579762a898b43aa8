"""The ``torch`` backend of convolved attention: block by block in PyTorch ops, O(N) memory, any
device.

It takes an online softmax over blocks of scores, as FlashAttention does, and folds the convolution
into the operands (:mod:`.lifting`), so that a block of convolved scores is one matrix product
without halos. The backward pass recomputes the blocks. Inputs may be fp16, bf16, fp32 or fp64, of
any strides; everything is computed in fp32, or in fp64 for fp64 inputs. Arguments are not checked
here, because the registered ops check them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..spec import Spec
from . import lifting
from .scores import Functions, Place

TILE = 256  # rows and columns of a block of scores: a quarter of a MiB in fp32, within a core's private cache


def forward(spec: Spec, call: Call, *, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """Compute softmax(conv2d(mask0(scale * q k^T), weight) masked) v and the log-sum-exp of its
    rows.

    Args:
        spec: the operator; dtype and head dims are taken from the tensors instead.
        call: a batch and its filters, without other stages and without dropout.
        tile: rows and columns of a block of scores.

    Returns:
        ``out [B, H, Nq, DV]`` in ``q.dtype`` and ``lse [B, H, Nq]`` in fp32 (fp64 for fp64 inputs). A query
        that sees no key gets 0 and -inf.
    """
    q, k, v = call.q, call.k, call.v
    off, dtype = k.shape[2] - q.shape[2], _compute_dtype(q)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    functions = Functions(spec, call.learned, dtype)
    for group in _groups(call):
        left, right, band = lifting.lift(spec, group.q, group.k, group.kernel)
        sink = functions.sink_of(Place(group.batch, group.head, 0, 0))
        for rows, columns in _row_tiles(spec, q.shape[2], k.shape[2], tile):
            # The maximum starts at a finite number, not -inf, so that exp(peak - peak) is 1 before a row sees a key.
            peak = torch.full_like(group.q[:, rows, :1], torch.finfo(dtype).min)
            total = torch.zeros_like(peak)
            acc = peak.new_zeros(*peak.shape[:2], v.shape[3])
            if sink is not None:
                peak, total = peak.copy_(sink), total.fill_(1)
            for cols in columns:
                place = Place(group.batch, group.head, rows.start + off, cols.start)
                scores = _score_tile(left[:, rows], right[:, cols], band[:, rows], place)
                p = _masked(spec, functions.value("logits", scores, place), place)
                new_peak = torch.maximum(peak, p.amax(-1, keepdim=True))
                decay, peak = (peak - new_peak).exp_(), new_peak
                p.sub_(peak).exp_()
                total.mul_(decay).add_(p.sum(-1, keepdim=True))
                acc.mul_(decay).baddbmm_(p, group.v[:, cols])
            # The clamp acts only on rows that see no key, because a row's largest score adds exp(0) to its total.
            out[group.batch, group.head, rows] = (acc / total.clamp(min=1)).to(out.dtype)
            lse[group.batch, group.head, rows] = (peak + total.log()).squeeze(-1)
    return out, lse


def backward(
    spec: Spec, call: Call, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *, tile: int = TILE
) -> tuple[Tensor, ...]:
    """Compute the gradients of :func:`forward`, by G = P * (dP - D + dLSE) at every score.

    Args:
        grad_out: ``[B, H, Nq, DV]``, the gradient of out.
        grad_lse: ``[B, H, Nq]``, the gradient of lse.
        out, lse: the results of :func:`forward`; the other arguments are those of :func:`forward`.

    Returns:
        The gradients of q, k, v, weight, the sink and the parameters, in their shapes and dtypes.
    """
    q, k, v, (weight,) = call.q, call.k, call.v, call.weights
    off, dtype = k.shape[2] - q.shape[2], _compute_dtype(q)
    dq = torch.zeros_like(q)
    functions = Functions(spec, call.learned, dtype)
    dk, dv, dweight = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v, weight))
    for group in _groups(call):
        left, right, band = lifting.lift(spec, group.q, group.k, group.kernel)
        dleft, dright = (group.q.new_zeros(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (left, right))
        dband, dvalues = torch.zeros_like(band), torch.zeros_like(group.v)

        query_side = group.batch, group.head
        douts = grad_out[query_side].to(dtype)
        dots = (douts * out[query_side]).sum(-1, keepdim=True)
        dots -= grad_lse[query_side].unsqueeze(-1)
        norms = lse[query_side].unsqueeze(-1)
        functions.sink_backward(norms, -dots, Place(group.batch, group.head, 0, 0))
        # A row that sees no key gets P = exp(-inf - inf) = 0, because all its scores are masked.
        norms.masked_fill_(norms == -torch.inf, torch.inf)
        for rows, columns in _row_tiles(spec, q.shape[2], k.shape[2], tile):
            left_tile, douts_tile = left[:, rows].flatten(2), douts[:, rows]
            for cols in columns:
                place = Place(group.batch, group.head, rows.start + off, cols.start)
                scores = _score_tile(left[:, rows], right[:, cols], band[:, rows], place)
                p = _masked(spec, functions.value("logits", scores, place), place).sub_(norms[:, rows]).exp_()
                dvalues[:, cols].baddbmm_(p.mT, douts_tile)
                g = (douts_tile @ group.v[:, cols].mT).sub_(dots[:, rows]).mul_(p)
                g = functions.backward("logits", g, scores, place)
                for diagonal, entry in _diagonals(g, dband[:, rows], place):
                    entry.copy_(diagonal)
                    diagonal.zero_()  # these scores came from the band, not from the operands' product
                dleft[:, rows].baddbmm_(g, right[:, cols].flatten(2))
                dright[:, cols].baddbmm_(g.mT, left_tile)

        dqueries, dkeys, dkernel = lifting.lift_backward(
            spec, dleft.view(left.shape), dright.view(right.shape), dband, group.q, group.k, group.kernel
        )
        dq[query_side] = dqueries.to(dq.dtype)
        # index_add_ adds heads that share keys or weights in a fixed order; index_put_ would not.
        key_side = group.batch * k.shape[1] + group.kv_head
        dk.flatten(0, 1).index_add_(0, key_side, dkeys)
        dv.flatten(0, 1).index_add_(0, key_side, dvalues)
        dweight.index_add_(0, group.head, call.scale * dkernel)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dweight.to(weight.dtype), *functions.results()


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Group(NamedTuple):
    """Heads computed together: their indices ``[G]``, and their inputs ``[G, ...]`` in the compute
    dtype.
    """

    batch: Tensor
    head: Tensor
    kv_head: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Tensor


def _groups(call: Call) -> Iterator[_Group]:
    """Yield groups of heads of all batch entries; none if there are no scores.

    A group has as many heads as fill a block of scores for each thread, because ops of short
    sequences cost more to call than to run. Larger groups are no faster and need memory: the lifted
    operands of a group are min(cq, ck) times as large as its inputs.
    """
    q, k, v, (weight,) = call.q, call.k, call.v, call.weights
    heads, ratio, dtype = q.shape[1], q.shape[1] // k.shape[1], _compute_dtype(q)
    if not (q.shape[2] and k.shape[2]):
        return
    heads_per_thread = max(1, TILE**2 // (q.shape[2] * k.shape[2]))
    for part in _split(q.shape[0] * heads, heads_per_thread * torch.get_num_threads()):
        index = torch.arange(part.start, part.stop, device=q.device)
        batch, head = index // heads, index % heads
        kv_head = head // ratio
        yield _Group(
            batch,
            head,
            kv_head,
            q[batch, head].to(dtype),
            k[batch, kv_head].to(dtype),
            v[batch, kv_head].to(dtype),
            call.scale * weight[head].to(dtype),
        )


def _row_tiles(spec: Spec, nq: int, nk: int, tile: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows, each with the blocks of columns of which it sees a part."""
    for rows in _split(nq, tile):
        yield rows, _split(nk if spec.right is None else min(nk, rows.stop + nk - nq), tile)


def _split(n: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, n)) for start in range(0, n, tile)]


def _score_tile(left: Tensor, right: Tensor, band: Tensor, place: Place) -> Tensor:
    """Return convolved scores ``[G, R, J]``."""
    scores = left.new_zeros(*left.shape[:2], right.shape[1])
    for x, y in zip(left.unbind(2), right.unbind(2), strict=True):
        scores.baddbmm_(x, y.mT)  # one product over all m * D would have about twice the rounding error
    for diagonal, entry in _diagonals(scores, band, place):
        diagonal.copy_(entry)
    return scores


def _masked(spec: Spec, scores: Tensor, place: Place) -> Tensor:
    """Set hidden scores to -inf, in place."""
    if spec.right is not None and place.corner < scores.shape[2] - 1:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(place.corner + 1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _diagonals(scores: Tensor, band: Tensor, place: Place) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each diagonal i + off - j = delta of a block with its entries in ``band [G, R,
    width]``, as views.
    """
    corner = place.corner
    for delta in range(max(0, corner - scores.shape[2] + 1), band.shape[2]):
        diagonal = scores.diagonal(corner - delta, 1, 2)
        first = max(0, delta - corner)
        yield diagonal, band[:, first : first + diagonal.shape[1], delta]
