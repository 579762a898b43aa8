"""Flop counts of the ops for ``torch.utils.flop_counter.FlopCounterMode``.

They follow PyTorch's convention for attention. A multiply-add is 2 flop. A forward pass has two
matrix products, a backward pass five, because it computes the scores again. Scores that a causal
mask hides count in full.

The other stages are counted as in the mathematics. In a forward pass, a convolution takes one
multiply-add per tap and score, a mixing one per head of a group and score, and 2 R + 1 for each
token that adds a matrix of rank R to it. A backward pass takes twice as many, for the gradients of
the stage's input and of its weight.

The counts depend on shapes alone, and on where packed documents begin. Where the latter is not
known, as in tracing, every document counts as if it were the longest. The flop of a plan's kernels
(:meth:`mtagen.Plan.flops_per_score`) differ, because each lowering computes a stage in its own way.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..call import Call, Step


def forward_flop(call: Call) -> int:
    """Count the flop of a call of ``mtagen::forward``: q k^T, the stages and the product with v."""
    return 2 * _scores(call) * (call.q.shape[-1] + call.v.shape[-1] + _terms(call))


def backward_flop(call: Call) -> int:
    """Count the flop of a call of ``mtagen::backward``.

    They are those of q k^T, dO v^T, A^T dO, dS k and dS^T q, of the stages' adjoints and of the
    weights' gradients.
    """
    return 2 * _scores(call) * (3 * call.q.shape[-1] + 2 * call.v.shape[-1] + 2 * _terms(call))


def decode_flop(step: Step) -> int:
    """Count the flop of a call of ``mtagen::decode``, scores of the context queries included.

    Each convolution leaves cq - 1 rows fewer to the stages after it. All keys of a cache count,
    because shapes do not say how many are in use.
    """
    (batch, heads, rows, d), n, dv = step.q_tail.shape, step.capacity, step.v_cache.shape[3]
    flop_per_key = rows * d
    before = step.weight, step.head_weight, step.query_factors, step.key_factors
    after = step.post_weight, step.post_head_weight, step.post_query_factors, step.post_key_factors
    for kernel, matrix, *factors in (before, after):
        rows -= 0 if kernel is None else kernel.shape[1] - 1
        flop_per_key += rows * (_taps(kernel) + _mixed(matrix) + sum(map(_of_token, factors)))
    return 2 * batch * heads * n * (flop_per_key + rows * dv)


def _scores(call: Call) -> int:
    """Count the (row, key) pairs of all heads and sequences."""
    if call.documents is None:
        batch, heads, n_q, _ = call.q.shape
        return batch * heads * n_q * call.k.shape[2]
    cu_seq_q, cu_seq_k, max_q, max_k = call.documents
    if isinstance(cu_seq_q, FakeTensor) or cu_seq_q.is_meta:
        return call.q.shape[1] * (len(cu_seq_q) - 1) * max_q * max_k
    return call.q.shape[1] * int((cu_seq_q.diff().long() * cu_seq_k.diff()).sum())


def _terms(call: Call) -> int:
    """Count the products that the stages sum for a score."""
    filters, mixtures = (call.weight, call.post_weight), (call.head_weight, call.post_head_weight)
    factors = call.query_factors, call.key_factors, call.post_query_factors, call.post_key_factors
    return sum(map(_taps, filters)) + sum(map(_mixed, mixtures)) + sum(map(_of_token, factors))


def _taps(kernel: Tensor | None) -> int:
    """Count the products that an entry of a convolution's result sums."""
    return 0 if kernel is None else kernel.shape[1] * kernel.shape[2]


def _of_token(factors: Tensor | None) -> int:
    """Count the products that a token's factors add to a mixing: sums over heads, and their terms in results."""
    return 0 if factors is None else factors.shape[-1]


def _mixed(matrix: Tensor | None) -> int:
    """Count the products that an entry of a mixing's result sums."""
    return 0 if matrix is None else matrix.shape[1]
