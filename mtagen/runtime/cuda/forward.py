"""Host side of the fused forward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...planner.tile.forward import TileForward
from .kernel import LoadedKernel


def forward(
    kernels: Mapping[str, LoadedKernel],
    plan: TileForward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, H, Nq, DV) in q's dtype and lse (B, H, Nq) fp32."""
    batch, heads, n_q, _ = q.shape
    _, kv_heads, n_k, dv = v.shape
    out = q.new_empty(batch, heads, n_q, dv)
    lse = q.new_empty(batch, heads, n_q, dtype=torch.float32)
    # Without generators: where sequences are short, the CPU's time is the call's.
    kernels["forward"](
        (batch * heads, -(-n_q // plan.owned), 1),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), weight.data_ptr(), out.data_ptr(), lse.data_ptr()),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(n_q, n_k, heads, heads // kv_heads),
        scale,
    )
    return out, lse
