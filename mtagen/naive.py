"""The specification: convolutional attention in plain PyTorch, materialised, differentiable by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    key_padding: str = "both",
    mask: str = "source",
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(conv2d(mask0(scale * q k^T), weight) masked) v, all of it in ``q.dtype`` and O(Nq * Nk) memory.

    The key-query convolution of Multi-Token Attention (Golovneva et al., 2025): it sees cq-1 past queries and
    the current one, and ck keys around the current one. Queries are aligned to the end of the keys. A score
    is zeroed before the convolution where its own query must not see its key (``mask="source"``, the authors'
    code) or where the query of the convolution's result must not (``mask="output"``, the formula printed in
    the paper).

    Args:
        q: queries ``[B, H, Nq, D]``, any float dtype.
        k: keys ``[B, Hkv, Nk, D]`` with H a multiple of Hkv.
        v: values ``[B, Hkv, Nk, DV]``.
        weight: convolution kernels ``[H, cq, ck]`` or ``[H, 1, cq, ck]``; cast to ``q.dtype``.
        causal: query i sees keys ``j <= i + Nk - Nq`` only.
        key_padding: ``both``: the convolution is centred on key j, at tap (ck-1)//2; ``left``: it ends there;
            ``right``: it begins there.
        mask: ``source`` or ``output``; without effect unless ``causal``.
        scale: factor of q k^T; ``None`` means ``D ** -0.5``.
        return_lse: also return the log-sum-exp of each row of masked scores.

    Returns:
        ``out [B, H, Nq, DV]``, or ``(out, lse [B, H, Nq])``, in ``q.dtype``. A query that sees no key gets 0
        and -inf.

    Raises:
        KeyError: ``key_padding`` is not known.
        ValueError: ``mask`` is not known.
    """
    if mask not in ("source", "output"):
        raise ValueError(f"mask: got {mask!r}; legal: ('source', 'output')")
    heads, (cq, ck) = q.shape[1], weight.shape[-2:]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    weight = weight.to(q.dtype).reshape(heads, 1, cq, ck)
    left = {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[key_padding]
    pad = (left, ck - 1 - left, cq - 1, 0)

    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    nq, nk = scores.shape[-2:]
    forbidden = torch.ones(nq, nk, dtype=torch.bool, device=q.device).triu(nk - nq + 1) & causal
    if scores.numel() == 0:
        mixed = scores
    elif mask == "source":
        mixed = _convolve(F.pad(scores.masked_fill(forbidden, 0), pad), weight)
    else:  # the mask follows the output's row: it commutes with the sum over rows, not with that over columns
        mixed, scores, hidden = torch.zeros_like(scores), F.pad(scores, pad), F.pad(forbidden, pad[:2])
        for c in range(ck):
            rows = _convolve(scores[..., c : c + nk], weight[..., c : c + 1])
            mixed = mixed + rows.masked_fill(hidden[:, c : c + nk], 0)
    mixed = mixed.masked_fill(forbidden, -torch.inf)
    out = mixed.softmax(-1).masked_fill(forbidden, 0) @ v  # the fill clears the NaN of rows that see no key
    return (out, mixed.logsumexp(-1)) if return_lse else out


def _convolve(scores: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own kernel, ``weight [H, 1, cq, ck]``."""
    # On CPUs with AVX512-FP16, oneDNN never finishes compiling a convolution in fp16 by 16 columns or more.
    hangs = scores.device.type == "cpu" and scores.dtype == torch.float16 and weight.shape[-1] > 15
    dtype = torch.float32 if hangs else scores.dtype
    return F.conv2d(scores.to(dtype), weight.to(dtype), groups=len(weight)).to(scores.dtype)
