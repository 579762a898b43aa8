"""Matrices that mix heads for each query, and their gradients."""

import torch


def _matrices_of_queries(weight: torch.Tensor, factors: torch.Tensor | None, batch: int, n_q: int) -> torch.Tensor:
    """The matrices (B, H/m, Nq, m, m) of queries: the weight (H/m, m, m), and what factors (B, H, Nq, 2 R + 1) add."""
    groups, heads, _ = weight.shape
    if factors is None:
        return weight[None, :, None].expand(batch, groups, n_q, heads, heads).contiguous()
    inner, outer, gate = _by_query(factors, groups)
    sums = weight[None, :, None] + torch.diag_embed(gate)
    for r in range(inner.shape[-1]):
        sums += outer[..., :, None, r] * inner[..., None, :, r]
    return sums


def _by_query(factors: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors (B, H, Nq, 2 R + 1) as (B, H/m, Nq, m, R), twice, and gates (B, H/m, Nq, m)."""
    batch, n_heads, n_q, width = factors.shape
    by_query = factors.view(batch, groups, n_heads // groups, n_q, width).transpose(2, 3)
    rank = width // 2
    return by_query[..., :rank], by_query[..., rank : 2 * rank], by_query[..., 2 * rank]


def _of_matrices(gradient: torch.Tensor, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of a weight (H/m, m, m), and of factors, from that of the matrices of queries."""
    of_weight = gradient.sum((0, 2))
    if factors is None:
        return of_weight, None
    of_factors = torch.empty_like(factors)
    parts = _by_query(factors, gradient.shape[1]), _by_query(of_factors, gradient.shape[1])
    (inner, outer, _), (d_inner, d_outer, d_gate) = parts
    for r in range(inner.shape[-1]):
        d_inner[..., r] = (gradient * outer[..., :, None, r]).sum(-2)
        d_outer[..., r] = (gradient * inner[..., None, :, r]).sum(-1)
    d_gate.copy_(gradient.diagonal(dim1=-2, dim2=-1))
    return of_weight, of_factors
