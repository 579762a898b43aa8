import torch


def _by_keys(x: torch.Tensor, kv_heads: int, keys: int) -> torch.Tensor:
    """A plane grouped by the heads of keys: (sequences * Hkv, rows of their heads, keys)."""
    slots, rows, pitch = x.shape
    return x.view(-1, slots * rows // kv_heads, pitch)[:, :, :keys]


def _rows_by_keys(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Rows (sequences, H, rows, dim) grouped by the heads of keys: (sequences * Hkv, rows of their heads, dim)."""
    batch, heads, rows, dim = x.shape
    return x.reshape(batch * kv_heads, heads // kv_heads * rows, dim)


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """Keys or values (sequences, Hkv, keys, dim), one head after the other."""
    return x.reshape(-1, *x.shape[2:])


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> None:
    """total (sequences, heads, rows, dim) fp32 += factor a b, of matrices one head after the other."""
    flat = total.flatten(0, 1)  # a view
    if total.is_cuda and a.dtype != torch.float32:
        torch.baddbmm(flat, a, b, alpha=factor, out_dtype=torch.float32, out=flat)
    else:
        flat.add_(torch.bmm(a, b), alpha=factor)
