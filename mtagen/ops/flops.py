"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops.

PyTorch's convention for attention holds: a multiply-add is 2 flop; a forward pass has two matrix products and a
backward pass five, for it computes the scores again; nothing is taken off for what a causal mask hides. The other
stages are counted as the mathematics has them: a convolution is a multiply-add per tap and score in a forward pass, a
mixture one per head of a group and score, and in a backward pass each is two of them, for the gradients of what it
takes and of its weight. The counts depend on shapes alone. What a plan's kernels do is another figure
(:meth:`mtagen.Plan.flops_per_score`), for each lowering has its own way to do a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Shape: TypeAlias = Sequence[int]


def attention_forward_flop(
    q: Shape,
    k: Shape,
    v: Shape,
    weight: Shape | None,
    head_weight: Shape | None,
    post_weight: Shape | None,
    post_head_weight: Shape | None,
    *_: object,
    **__: object,
) -> int:
    """Flop of q k^T, of the stages, and of the product with v.

    Args:
        q, k, v: shapes ``(B, H, Nq, D)``, ``(B, Hkv, Nk, D)``, ``(B, Hkv, Nk, DV)``.
        weight, post_weight: shapes ``(H, cq, ck)``; None: no such stage.
        head_weight, post_head_weight: shapes ``(H/m, m, m)``; None: no such stage.
    """
    (batch, heads, n_q, d), n_k, dv = q, k[2], v[3]
    terms = _taps(weight) + _mixed(head_weight) + _taps(post_weight) + _mixed(post_head_weight)
    return 2 * batch * heads * n_q * n_k * (d + dv + terms)


def attention_backward_flop(
    grad_out: Shape,
    grad_lse: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    weight: Shape | None,
    head_weight: Shape | None,
    post_weight: Shape | None,
    post_head_weight: Shape | None,
    *_: object,
    **__: object,
) -> int:
    """Flop of q k^T, dO v^T, A^T dO, dS k and dS^T q, of the stages' adjoints and of the gradients of their weights.

    Args:
        grad_out, grad_lse: shapes ``(B, H, Nq, DV)`` and ``(B, H, Nq)``.
        q, k, v, weight, head_weight, post_weight, post_head_weight: as in :func:`attention_forward_flop`.
    """
    (batch, heads, n_q, d), n_k, dv = q, k[2], v[3]
    terms = _taps(weight) + _mixed(head_weight) + _taps(post_weight) + _mixed(post_head_weight)
    return 2 * batch * heads * n_q * n_k * (3 * d + 2 * dv + 2 * terms)


def attention_decode_flop(
    q_tail: Shape,
    k_cache: Shape,
    v_cache: Shape,
    weight: Shape | None,
    head_weight: Shape | None,
    post_weight: Shape | None,
    post_head_weight: Shape | None,
    *_: object,
    **__: object,
) -> int:
    """Flop of a decode step, which has scores of the queries before the new ones, too; a convolution uses up its rows.

    All keys of a cache count: how many are in use is not known from the shapes.

    Args:
        q_tail: shape ``(B, H, context + n_new, D)``, with ``cq - 1`` rows of context for each convolution.
        k_cache, v_cache: shapes ``(B, Hkv, N, D)`` and ``(B, Hkv, N, DV)``.
        weight, head_weight, post_weight, post_head_weight: as in :func:`attention_forward_flop`.
    """
    (batch, heads, rows, d), n, dv = q_tail, k_cache[2], v_cache[3]
    flop_per_key = rows * d
    for kernel, matrix in ((weight, head_weight), (post_weight, post_head_weight)):
        rows -= kernel[1] - 1 if kernel else 0
        flop_per_key += rows * (_taps(kernel) + _mixed(matrix))
    return 2 * batch * heads * n * (flop_per_key + rows * dv)


def _taps(kernel: Shape | None) -> int:
    """How many products an entry of a convolution's result sums."""
    return kernel[1] * kernel[2] if kernel else 0


def _mixed(matrix: Shape | None) -> int:
    """How many products an entry of a mixture's result sums."""
    return matrix[1] if matrix else 0
