"""Host side of the fused backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...planner.tile.backward import TileBackward
from .kernel import LoadedKernel


def backward(
    kernels: Mapping[str, LoadedKernel],
    plan: TileBackward,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of q, contiguous, and dweight (H, cq, ck) fp32.

    dk, dv and dweight are bit-reproducible; dq is a sum of fp32 atomics, in a fixed order if ``deterministic``.
    """
    batch, heads, n_q, _ = q.shape
    kv_heads, n_k = k.shape[1:3]
    blocks = -(-n_k // plan.owned)
    f32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dweight = torch.empty(weight.shape, **f32)
    pitch = int(plan.row_pitch.subs("n_q", n_q))
    row_lse, row_dot = (torch.empty(batch * heads * pitch, **f32) for _ in range(2))
    dq_sum = torch.empty(q.shape, **f32)
    dw_sums = torch.empty(weight.numel() * batch * blocks, **f32)
    progress = torch.zeros(batch * heads * blocks if deterministic else 0, dtype=torch.int32, device=q.device)

    kernels["backward_rows"](
        (batch * heads * -(-pitch * plan.lanes // 256), 1, 1),
        *(x.data_ptr() for x in (out, grad_out, lse, grad_lse, row_lse, row_dot, dq_sum)),
        *grad_out.stride()[:3],
        *(heads, n_q, pitch),
    )
    kernels["backward"](
        (batch * kv_heads, blocks, 1),
        *(x.data_ptr() for x in (q, k, v, grad_out, weight, row_lse, row_dot, dq_sum, dk, dv, dw_sums, progress)),
        *(stride for x in (q, k, v, grad_out) for stride in x.stride()[:3]),
        *(n_q, n_k, heads, heads // kv_heads, pitch),
        scale,
    )
    pieces = q.numel() // 16
    kernels["backward_finish"](
        (-(-weight.numel() // 8) + -(-pieces // 256), 1, 1),
        *(x.data_ptr() for x in (dq_sum, dq, dw_sums, dweight)),
        *(pieces, batch * blocks, heads),
        scale,
    )
    return dq, dk, dv, dweight
