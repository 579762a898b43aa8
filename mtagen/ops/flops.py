"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops.

PyTorch's convention for attention holds: a multiply-add is 2 flop; a forward pass has two matrix products and a
backward pass five, for it computes the scores again; nothing is taken off for what a causal mask hides. The
convolution is counted as the mathematics has it: a multiply-add per tap and score in a forward pass, and two in a
backward pass, for the gradients of the scores and of the weight. The counts depend on shapes alone. What a plan's
kernels do is another figure (:meth:`mtagen.Plan.flops_per_score`), for each lowering convolves in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = Sequence[int]


def attention_forward_flop(q: Shape, k: Shape, v: Shape, weight: Shape, *_: object, **__: object) -> int:
    """Flop of q k^T, of its convolution, and of P v.

    Args:
        q, k, v, weight: shapes ``(B, H, Nq, D)``, ``(B, Hkv, Nk, D)``, ``(B, Hkv, Nk, DV)``, ``(H, cq, ck)``.
    """
    (batch, heads, n_q, d), n_k, dv, taps = q, k[2], v[3], weight[1] * weight[2]
    return 2 * batch * heads * n_q * n_k * (d + dv + taps)


def attention_backward_flop(
    grad_out: Shape, grad_lse: Shape, q: Shape, k: Shape, v: Shape, weight: Shape, *_: object, **__: object
) -> int:
    """Flop of q k^T, dO v^T, P^T dO, dS k and dS^T q, of the convolution's adjoint and of the gradient of the weight.

    Args:
        grad_out, grad_lse: shapes ``(B, H, Nq, DV)`` and ``(B, H, Nq)``.
        q, k, v, weight: as in :func:`attention_forward_flop`.
    """
    (batch, heads, n_q, d), n_k, dv, taps = q, k[2], v[3], weight[1] * weight[2]
    return 2 * batch * heads * n_q * n_k * (3 * d + 2 * dv + 2 * taps)


def attention_decode_flop(
    q_tail: Shape, k_cache: Shape, v_cache: Shape, weight: Shape, *_: object, **__: object
) -> int:
    """Flop of a decode step, which has scores of the ``cq - 1`` queries before the new ones, too.

    All keys of a cache count: how many are in use is not known from the shapes.

    Args:
        q_tail, k_cache, v_cache: shapes ``(B, H, cq - 1 + n_new, D)``, ``(B, Hkv, N, D)``, ``(B, Hkv, N, DV)``.
        weight: as in :func:`attention_forward_flop`.
    """
    (batch, heads, tail, d), n, dv, (cq, ck) = q_tail, k_cache[2], v_cache[3], weight[1:]
    return 2 * batch * heads * n * (tail * d + (tail - cq + 1) * (dv + cq * ck))
