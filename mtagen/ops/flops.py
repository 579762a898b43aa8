"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops.

PyTorch's convention for attention holds: a multiply-add is 2 flop; a forward pass has two matrix products and a
backward pass five, for it computes the scores again; nothing is taken off for what a causal mask hides. The other
stages are counted as the mathematics has them: a convolution is a multiply-add per tap and score in a forward pass, a
mixture one per head of a group and score, and in a backward pass each is two of them, for the gradients of what it
takes and of its weight. The counts depend on shapes alone, and on where packed documents begin; where that is not
known, as in tracing, every document counts as one of the longest. What a plan's kernels do is another figure
(:meth:`mtagen.Plan.flops_per_score`), for each lowering has its own way to do a stage.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def attention_forward_flop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    head_weight: Tensor | None,
    post_weight: Tensor | None,
    post_head_weight: Tensor | None,
    scale: float,
    key: str,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    *_: object,
    **__: object,
) -> int:
    """Flop of q k^T, of the stages, and of the product with v, of a call of the op ``mtagen::forward``."""
    terms = _taps(weight) + _mixed(head_weight) + _taps(post_weight) + _mixed(post_head_weight)
    scores = _scores(q, k, cu_seq_q, cu_seq_k, max_q, max_k)
    return 2 * scores * (q.shape[-1] + v.shape[-1] + terms)


def attention_backward_flop(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    head_weight: Tensor | None,
    post_weight: Tensor | None,
    post_head_weight: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    key: str,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    *_: object,
    **__: object,
) -> int:
    """Flop of q k^T, dO v^T, A^T dO, dS k and dS^T q, of the stages' adjoints and of the gradients of their weights."""
    terms = _taps(weight) + _mixed(head_weight) + _taps(post_weight) + _mixed(post_head_weight)
    scores = _scores(q, k, cu_seq_q, cu_seq_k, max_q, max_k)
    return 2 * scores * (3 * q.shape[-1] + 2 * v.shape[-1] + 2 * terms)


def attention_decode_flop(
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor | None,
    head_weight: Tensor | None,
    post_weight: Tensor | None,
    post_head_weight: Tensor | None,
    *_: object,
    **__: object,
) -> int:
    """Flop of a decode step, which has scores of the queries before the new ones, too; a convolution uses up its rows.

    All keys of a cache count: how many are in use is not known from the shapes.
    """
    (batch, heads, rows, d), n, dv = q_tail.shape, k_cache.shape[2], v_cache.shape[3]
    flop_per_key = rows * d
    for kernel, matrix in ((weight, head_weight), (post_weight, post_head_weight)):
        rows -= 0 if kernel is None else kernel.shape[1] - 1
        flop_per_key += rows * (_taps(kernel) + _mixed(matrix))
    return 2 * batch * heads * n * (flop_per_key + rows * dv)


def _scores(q: Tensor, k: Tensor, cu_seq_q: Tensor | None, cu_seq_k: Tensor | None, max_q: int, max_k: int) -> int:
    """(row, key) pairs over all heads and sequences."""
    if cu_seq_q is None or cu_seq_k is None:
        batch, heads, n_q, _ = q.shape
        return batch * heads * n_q * k.shape[2]
    if isinstance(cu_seq_q, FakeTensor) or cu_seq_q.is_meta:
        return q.shape[1] * (len(cu_seq_q) - 1) * max_q * max_k
    return q.shape[1] * int((cu_seq_q.diff().long() * cu_seq_k.diff()).sum())


def _taps(kernel: Tensor | None) -> int:
    """How many products an entry of a convolution's result sums."""
    return 0 if kernel is None else kernel.shape[1] * kernel.shape[2]


def _mixed(matrix: Tensor | None) -> int:
    """How many products an entry of a mixture's result sums."""
    return 0 if matrix is None else matrix.shape[1]
