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
