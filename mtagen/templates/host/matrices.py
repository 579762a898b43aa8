import torch


def _matrices(partial: torch.Tensor, n_heads: int, mixed: int, heads: int) -> torch.Tensor:
    """Gradients (H/m, m, m) of matrices from partial sums (B, bundles, programs, heads, heads) of bundles of heads."""
    bundles, groups = partial.shape[1], heads // mixed
    sums: torch.Tensor = partial.sum((0, 2))
    if heads < sums.shape[1]:
        sums = sums[:, :heads, :heads]
    if groups == 1:
        return sums.contiguous()
    blocks = sums.reshape(bundles, groups, mixed, groups, mixed).diagonal(dim1=1, dim2=3)  # (bundles, m, m, groups)
    return blocks.permute(0, 3, 1, 2).reshape(-1, mixed, mixed)[: n_heads // mixed].contiguous()
