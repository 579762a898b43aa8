"""Gradients of parameters from sums of kernels."""

import torch


def _of_parameter(sums: torch.Tensor, batch: int, entries: bool, heads: bool) -> torch.Tensor:
    """The gradient (B, H, ...) of a parameter from sums (B * n_heads, ...), without the axes that it lacks.

    Args:
        sums: of each head of each batch entry.
        batch: B.
        entries, heads: whether batch entries and heads have numbers of their own.
    """
    sums = sums.view(batch, -1, *sums.shape[1:])
    sums = sums if heads else sums.sum(1, keepdim=True)
    sums = sums if entries else sums.sum(0, keepdim=True)
    axes = [axis for axis, kept in enumerate((entries, heads)) if not kept]
    return sums.squeeze(axes)


def _at_positions(sums: torch.Tensor, n_k: int) -> torch.Tensor:
    """Sums (heads, n_q) of rows as sums (heads, n_k) of tokens: row i lies at position i + n_k - n_q.

    Rows before key 0 have read the entry of key 0.
    """
    off = n_k - sums.shape[1]
    if off >= 0:
        return torch.nn.functional.pad(sums, (off, 0))
    return torch.cat([sums[:, : 1 - off].sum(1, keepdim=True), sums[:, 1 - off :]], 1)


def _at_tokens(sums: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, total_k: int) -> torch.Tensor:
    """The same for packed documents: sums (heads, total_q) of rows as sums (heads, total_k) of tokens."""
    rows = torch.arange(sums.shape[1], device=sums.device)
    document = torch.searchsorted(cu_seq_q, rows, right=True, out_int32=True) - 1
    document = document.clamp(max=len(cu_seq_q) - 2).long()
    before_end = cu_seq_q[document + 1] - rows  # rows from this one to the document's end
    token = torch.maximum(cu_seq_k[document + 1] - before_end, cu_seq_k[document]).clamp(0, total_k - 1).long()
    heads = torch.arange(len(sums), device=sums.device)[:, None]
    # PyTorch sorts the indices to add up equal ones, so the result is bit-reproducible.
    return sums.new_zeros(len(sums), total_k).index_put_((heads, token[None, :]), sums, accumulate=True)


def _of_bundles(partial: torch.Tensor, batch: int, n_heads: int, heads: int) -> torch.Tensor:
    """Sums (B * n_heads, ...) from partial sums (B * bundles, programs, padded heads, ...) of bundles of heads."""
    sums = partial.sum(1).view(batch, -1, *partial.shape[2:])[:, :, :heads]
    return sums.flatten(1, 2)[:, :n_heads].flatten(0, 1)


def _of_sink(sink: torch.Tensor, lse: torch.Tensor, minus_dot: torch.Tensor) -> torch.Tensor:
    """The gradient (H,) of sinks: the sum over rows of exp(sink - lse) (dlse - D).

    Args:
        sink: (H,).
        lse: (..., H, rows), -inf in rows that no softmax has.
        minus_dot: dlse - D of each row.
    """
    terms = torch.exp(sink[:, None] - lse) * minus_dot
    sums = torch.where(lse == -torch.inf, 0.0, terms).sum(-1)
    return sums if sums.ndim == 1 else sums.sum(0)
