"""The specification: convolutional attention in plain PyTorch, materialised, differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None = None,
    *,
    head_weight: Tensor | None = None,
    post_weight: Tensor | None = None,
    post_head_weight: Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    key_padding: str = "both",
    mask: str = "source",
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """dropout(mix(conv(softmax(mix(conv(scale * q k^T)))))) v, all of it in ``q.dtype`` and O(Nq * Nk) memory.

    Multi-Token Attention (Golovneva et al., 2025). A convolution sees cq-1 past queries and the current one, and ck
    keys around the current one; a mixture is over the heads of a group. Each of the four stages is left out if its
    weight is not given. Queries are aligned to the end of the keys. An entry is zeroed before a convolution where its
    own query must not see its key (``mask="source"``, the authors' code) or where the query of the convolution's result
    must not (``mask="output"``, the formula printed in the paper).

    Args:
        q: queries ``[B, H, Nq, D]``, any float dtype.
        k: keys ``[B, Hkv, Nk, D]`` with H a multiple of Hkv.
        v: values ``[B, Hkv, Nk, DV]``.
        weight: kernels ``[H, cq, ck]`` or ``[H, 1, cq, ck]`` of the convolution before the softmax. As the other
            weights it is cast to ``q.dtype``.
        head_weight: matrices ``[H/m, m, m]`` that mix the heads before the softmax, indexed [group, out head, in head];
            groups are of m consecutive heads. ``[m, m]`` where m = H.
        post_weight: kernels of the convolution after the softmax, as ``weight``; its extents may differ.
        post_head_weight: matrices that mix the heads after the softmax, as ``head_weight``; its m may differ.
        causal: query i sees keys ``j <= i + Nk - Nq`` only.
        window: ``(left, right)``: query i sees keys ``i + Nk - Nq - left <= j <= i + Nk - Nq + right`` only, as
            FlashAttention defines it; -1 is no limit.
        key_padding: of both convolutions: ``both``: centred on key j, at tap (ck-1)//2; ``left``: it ends there;
            ``right``: it begins there.
        mask: of both convolutions: ``source`` or ``output``; without effect where every query sees every key.
        scale: factor of q k^T; ``None`` means ``D ** -0.5``.
        dropout_p: what is kept of the factors of v is divided by 1 - dropout_p.
        dropout_mask: ``[B, H, Nq, Nk]`` bool, which of them are kept (:func:`mtagen.dropout_mask`); default all.
        return_lse: also return the log-sum-exp of each row of masked scores, as the softmax takes them.

    Returns:
        ``out [B, H, Nq, DV]``, or ``(out, lse [B, H, Nq])``, in ``q.dtype``. A query that sees no key gets the
        probabilities 0 and -inf.

    Raises:
        KeyError: ``key_padding`` is not known.
        ValueError: ``mask`` is not known.
    """
    if mask not in ("source", "output"):
        raise ValueError(f"mask: got {mask!r}; legal: ('source', 'output')")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    nq, nk = scores.shape[-2:]
    after = torch.arange(nk, device=q.device) - torch.arange(nk - nq, nk, device=q.device).unsqueeze(1)
    left, right = window[0], 0 if causal else window[1]
    forbidden = ((left >= 0) & (after < -left)) | ((right >= 0) & (after > right))
    scores = _mix(_convolve(scores, weight, forbidden, key_padding, mask), head_weight)
    scores = scores.masked_fill(forbidden, -torch.inf)
    shares = scores.softmax(-1).masked_fill(forbidden, 0)  # the fill clears the NaN of rows that see no key
    if post_weight is not None:
        shares = _convolve(shares, post_weight, forbidden, key_padding, mask).masked_fill(forbidden, 0)
    shares = _mix(shares, post_head_weight)
    if dropout_mask is not None:
        shares = shares * dropout_mask / (1 - dropout_p)
    out = shares @ v
    return (out, scores.logsumexp(-1)) if return_lse else out


def _mix(x: Tensor, weight: Tensor | None) -> Tensor:
    """The heads of each group by its matrix."""
    if weight is None:
        return x
    weight = weight.to(x.dtype).reshape(-1, *weight.shape[-2:])
    grouped = torch.unflatten(x, 1, weight.shape[:2])
    return torch.einsum("goi,bgirc->bgorc", weight, grouped).flatten(1, 2)


def _convolve(x: Tensor, weight: Tensor | None, forbidden: Tensor, key_padding: str, mask: str) -> Tensor:
    """Each head by its own kernel."""
    if weight is None or x.numel() == 0:
        return x
    (heads, nk), (cq, ck) = x.shape[1::2], weight.shape[-2:]
    weight = weight.to(x.dtype).reshape(heads, 1, cq, ck)
    left = {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[key_padding]
    pad = (left, ck - 1 - left, cq - 1, 0)
    if mask == "source":
        return _correlate(F.pad(x.masked_fill(forbidden, 0), pad), weight)
    # The mask follows the output's row: it commutes with the sum over rows, not with that over columns.
    padded, hidden, convolved = F.pad(x, pad), F.pad(forbidden, pad[:2]), torch.zeros_like(x)
    for c in range(ck):
        rows = _correlate(padded[..., c : c + nk], weight[..., c : c + 1])
        convolved = convolved + rows.masked_fill(hidden[:, c : c + nk], 0)
    return convolved


def _correlate(x: Tensor, weight: Tensor) -> Tensor:
    # On CPUs with AVX512-FP16, oneDNN never finishes compiling a convolution in fp16 by 16 columns or more.
    hangs = x.device.type == "cpu" and x.dtype == torch.float16 and weight.shape[-1] > 15
    dtype = torch.float32 if hangs else x.dtype
    return F.conv2d(x.to(dtype), weight.to(dtype), groups=len(weight)).to(x.dtype)
