import torch

from .recipes import Call, _viewed


def _by_keys(x: torch.Tensor, kv_heads: int, keys: int) -> torch.Tensor:
    """A plane grouped by the heads of keys: (sequences * Hkv, rows of their heads, keys)."""
    slots, rows, pitch = x.shape
    return x.view(-1, slots * rows // kv_heads, pitch)[:, :, :keys]


def _rows_by_keys(call: Call, name: str, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Rows (sequences, H, rows, dim) grouped by the heads of keys: (sequences * Hkv, rows of their heads, dim)."""
    batch, heads, rows, dim = x.shape
    return call.reshaped(name, x, (batch * kv_heads, heads // kv_heads * rows, dim))


def _by_heads(call: Call, name: str, x: torch.Tensor) -> torch.Tensor:
    """Keys or values (sequences, Hkv, keys, dim), one head after the other."""
    batch, heads, keys, dim = x.shape
    return call.reshaped(name, x, (batch * heads, keys, dim))


def _add_product(
    call: Call, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float = 1.0, adds: bool = True
) -> None:
    """Add factor a b to a tensor (sequences, heads, rows, dim), or store it there.

    Args:
        call: the call.
        total: the tensor; fp32 if it is added to.
        a, b: matrices, one after the other, whose products have the elements of `total` in its order.
        factor: of the products.
        adds: whether to add.
    """
    shape = (*a.shape[:2], b.shape[2])
    view = _viewed(total, shape)
    if view is not None:
        call.run(_multiply, view, a, b, factor, adds)
        return
    product = call.workspace("product", shape, a.dtype)
    call.run(_multiply, product, a, b, 1.0, False)
    call.run(_add, total, product.view(total.shape), factor, adds)


def _multiply(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float, adds: bool) -> None:
    """factor a b in `total`, or added to it."""
    if not adds and total.dtype == a.dtype:
        if factor == 1.0:
            torch.bmm(a, b, out=total)
        else:
            torch.baddbmm(total, a, b, beta=0, alpha=factor, out=total)
    elif total.is_cuda and a.dtype != torch.float32:
        torch.baddbmm(total, a, b, beta=int(adds), alpha=factor, out_dtype=torch.float32, out=total)
    else:
        _add(total, torch.bmm(a, b), factor, adds)


def _add(total: torch.Tensor, x: torch.Tensor, factor: float, adds: bool) -> None:
    """factor x in `total`, or added to it."""
    if adds:
        total.add_(x, alpha=factor)
    else:
        torch.mul(x.to(total.dtype), factor, out=total)  # else results are rounded to x's dtype


def _of_keys(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The gradient (B, Hkv, Nk, d) of keys, from that of their copies (B, H, Nk, d) for each head of queries."""
    return x if x.shape[1] == kv_heads else x.view(len(x), kv_heads, -1, *x.shape[2:]).sum(2)


def _head_parts(group: int, rows: int, short: int, ctas: int, enough: int) -> int:
    """The number of equal parts into which the heads of a group are divided, so that several CTAs sum over their rows.

    Args:
        group: the number of heads.
        rows: rows of each.
        short: the number of rows up to which one CTA sums over all.
        ctas: CTAs, if the heads are not divided.
        enough: the number of CTAs that keep all multiprocessors busy.
    """
    numbers = (n for n in range(1, group) if group % n == 0 and (n * ctas >= enough or group // n * rows <= short))
    return next(numbers, group)


def _add_parts(gradient: torch.Tensor, sums: torch.Tensor) -> None:
    """Store the gradient (B, Hkv, Nk, d) of keys, which is the sum of parts (B, Hkv * parts, Nk, d)."""
    gradient.copy_(_of_keys(sums, gradient.shape[1]))
