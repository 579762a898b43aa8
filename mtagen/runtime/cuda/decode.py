"""Host side of fused decode."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...planner.tile.decode import TileDecode
from .kernel import LoadedKernel


def decode(
    kernels: Mapping[str, LoadedKernel],
    plan: TileDecode,
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    scale: float,
    cache_seqlens: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, H, n_new, DV) in q's dtype and lse (B, H, n_new) fp32; num_splits None means as planned."""
    batch, heads, tail, _ = q_tail.shape
    _, kv_heads, n_max, dv = v_cache.shape
    group, n_new = heads // kv_heads, tail - (plan.spec.cq - 1)
    tile = plan.tile_for(group, n_new)
    cta_heads = tile.heads_for(group, n_new)
    owners = batch * kv_heads * -(-group // cta_heads)
    splits = num_splits or plan.splits_for(tile, owners, n_max)
    out = q_tail.new_empty(batch, heads, n_new, dv)
    lse = q_tail.new_empty(batch, heads, n_new, dtype=torch.float32)
    partial = partial_lse = lse  # of one split nothing is written
    if splits > 1:
        partial = lse.new_empty(batch, heads, n_new, splits, dv)
        partial_lse = lse.new_empty(batch, heads, n_new, splits)
    kernels[tile.role](
        (owners * splits, 1, 1),
        *(x.data_ptr() for x in (q_tail, k_cache, v_cache, weight)),
        0 if cache_seqlens is None else cache_seqlens.data_ptr(),
        *(x.data_ptr() for x in (out, lse, partial, partial_lse)),
        *(stride for x in (q_tail, k_cache, v_cache) for stride in x.stride()[:3]),
        *(n_max, kv_heads, group, n_new, cta_heads, splits),
        scale,
    )
    if splits > 1:
        pointers = (x.data_ptr() for x in (partial, partial_lse, out, lse))
        kernels["combine"]((batch * heads * n_new, 1, 1), *pointers, splits)
    return out, lse
