import torch


def _side_by_side(v: torch.Tensor, group: int, mixed: int) -> torch.Tensor:
    """The values of all heads that are mixed with each head, side by side.

    Args:
        v: (B, Hkv, Nk, dv), or (total_k, Hkv, dv) of packed documents.
        group: heads of queries for each head of keys.
        mixed: heads that are mixed with each other.

    Returns:
        (B, H, Nk, mixed * dv), or (total_k, H, mixed * dv).
    """
    v = v.repeat_interleave(group, 1) if group > 1 else v
    groups = v.reshape(v.shape[0], -1, 1, mixed, *v.shape[2:]).movedim(3, -2)
    sizes = [mixed if axis == 2 else -1 for axis in range(groups.ndim)]
    return groups.expand(sizes).reshape(*v.shape[:-1], -1)


def _of_values(x: torch.Tensor, group: int, mixed: int) -> torch.Tensor:
    """The gradient of values, from that of what :func:`_side_by_side` makes of them.

    Args:
        x: (B, H, Nk, mixed * dv), the gradient.
        group: heads of queries for each head of keys.
        mixed: heads that are mixed with each other.

    Returns:
        (B, Hkv, Nk, dv), in the dtype of x.
    """
    batch, heads, keys, width = x.shape
    parts = x.view(batch, heads // mixed, mixed, keys, mixed, width // mixed)
    # Of several sums, the last one rounds.
    dtype = torch.float32 if group > 1 else x.dtype
    return _of_keys(parts.sum(2, dtype=dtype).transpose(2, 3).reshape(batch, heads, keys, -1), group).to(x.dtype)


def _of_keys(x: torch.Tensor, group: int) -> torch.Tensor:
    """The gradient (B, Hkv, Nk, d) of keys, from that of a copy (B, H, Nk, d) for each head of queries."""
    return x if group == 1 else x.view(len(x), -1, group, *x.shape[2:]).sum(2)
