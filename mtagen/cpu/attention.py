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
from ..evaluate import logits_of, slopes_of
from ..spec import Spec
from . import lifting

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
    for group in _groups(call):
        left, right, band = lifting.lift(spec, group.q, group.k, group.kernel)
        places = _Places(spec, off, group.head)
        for rows, columns in _row_tiles(spec, q.shape[2], k.shape[2], tile):
            # The maximum starts at a finite number, not -inf, so that exp(peak - peak) is 1 before a row sees a key.
            peak = torch.full_like(group.q[:, rows, :1], torch.finfo(dtype).min)
            total = torch.zeros_like(peak)
            acc = peak.new_zeros(*peak.shape[:2], v.shape[3])
            for cols in columns:
                corner = rows.start + off - cols.start
                scores = _score_tile(left[:, rows], right[:, cols], band[:, rows], corner)
                p = places.logits(scores, rows, cols)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`forward`, by G = P * (dP - D + dLSE) at every score.

    Args:
        grad_out: ``[B, H, Nq, DV]``, the gradient of out.
        grad_lse: ``[B, H, Nq]``, the gradient of lse.
        out, lse: the results of :func:`forward`; the other arguments are those of :func:`forward`.

    Returns:
        ``(dq, dk, dv, dweight)`` in the shapes and dtypes of q, k, v and weight.
    """
    q, k, v, (weight,) = call.q, call.k, call.v, call.weights
    off, dtype = k.shape[2] - q.shape[2], _compute_dtype(q)
    dq = torch.zeros_like(q)
    dk, dv, dweight = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v, weight))
    for group in _groups(call):
        left, right, band = lifting.lift(spec, group.q, group.k, group.kernel)
        places = _Places(spec, off, group.head)
        dleft, dright = (group.q.new_zeros(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (left, right))
        dband, dvalues = torch.zeros_like(band), torch.zeros_like(group.v)

        query_side = group.batch, group.head
        douts = grad_out[query_side].to(dtype)
        dots = (douts * out[query_side]).sum(-1, keepdim=True)
        dots -= grad_lse[query_side].unsqueeze(-1)
        norms = lse[query_side].unsqueeze(-1)
        # A row that sees no key gets P = exp(-inf - inf) = 0, because all its scores are masked.
        norms.masked_fill_(norms == -torch.inf, torch.inf)
        for rows, columns in _row_tiles(spec, q.shape[2], k.shape[2], tile):
            left_tile, douts_tile = left[:, rows].flatten(2), douts[:, rows]
            for cols in columns:
                corner = rows.start + off - cols.start
                scores = _score_tile(left[:, rows], right[:, cols], band[:, rows], corner)
                p = places.logits(scores, rows, cols)
                p.sub_(norms[:, rows]).exp_()
                dvalues[:, cols].baddbmm_(p.mT, douts_tile)
                g = (douts_tile @ group.v[:, cols].mT).sub_(dots[:, rows]).mul_(p)
                g = places.convolved_gradient(g, scores, rows, cols)
                for diagonal, entry in _diagonals(g, dband[:, rows], corner):
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
    return dq, dk.to(k.dtype), dv.to(v.dtype), dweight.to(weight.dtype)


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


class _Places(NamedTuple):
    """Where the scores of a group of heads stand. Row i is at position i + ``off``."""

    spec: Spec
    off: int
    head: Tensor

    def logits(self, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        """Return what the softmax takes of a block of convolved scores: -inf where hidden."""
        if self.spec.logits is not None:
            scores = logits_of(self.spec.logits, scores, *self._of(rows, cols))
        hidden = self._hidden(rows, cols)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    def convolved_gradient(self, gradient: Tensor, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        """Return the gradient of convolved scores from that of :meth:`logits`."""
        if self.spec.logits is None:
            return gradient
        gradient = gradient * slopes_of(self.spec.logits, scores, *self._of(rows, cols))
        hidden = self._hidden(rows, cols)  # hidden slopes may be infinite or NaN
        return gradient if hidden is None else gradient.masked_fill(hidden, 0)

    def _of(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the position, key and head of each score of a block."""
        positions, keys = (torch.arange(x.start, x.stop, device=self.head.device) for x in (rows, cols))
        return positions[:, None] + self.off, keys, self.head[:, None, None]

    def _hidden(self, rows: slice, cols: slice) -> Tensor | None:
        """Return where keys of a block come after the row, or None if none does."""
        corner = rows.start + self.off - cols.start
        if self.spec.right is None or corner >= cols.stop - cols.start - 1:
            return None
        hidden = torch.ones(rows.stop - rows.start, cols.stop - cols.start, dtype=torch.bool, device=self.head.device)
        return hidden.triu(corner + 1)


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


def _score_tile(left: Tensor, right: Tensor, band: Tensor, corner: int) -> Tensor:
    """Return convolved scores ``[G, R, J]``; ``corner`` is i + off - j of the first."""
    scores = left.new_zeros(*left.shape[:2], right.shape[1])
    for x, y in zip(left.unbind(2), right.unbind(2), strict=True):
        scores.baddbmm_(x, y.mT)  # one product over all m * D would have about twice the rounding error
    for diagonal, entry in _diagonals(scores, band, corner):
        diagonal.copy_(entry)
    return scores


def _diagonals(scores: Tensor, band: Tensor, corner: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each diagonal i + off - j = delta of a block with its entries in ``band [G, R,
    width]``, as views.
    """
    for delta in range(max(0, corner - scores.shape[2] + 1), band.shape[2]):
        diagonal = scores.diagonal(corner - delta, 1, 2)
        first = max(0, delta - corner)
        yield diagonal, band[:, first : first + diagonal.shape[1], delta]
