"""Packed documents: inputs, and host functions and the reference as ops on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtagen.dtypes import TORCH_DTYPES
from mtagen.measure.inputs import Inputs
from mtagen.measure.judge import eager_op, judge
from mtagen.spec import Spec

Lengths = Sequence[tuple[int, int]]  # queries and keys of each document


class Packed(NamedTuple):
    """What tells kernels where documents begin, in the order of host functions' arguments."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, lengths: Lengths) -> Packed:
        """That of documents of these lengths."""
        queries, keys = zip((0, 0), *lengths, strict=True)
        cu_seq_q, cu_seq_k = (torch.tensor(n).cumsum(0).to(torch.int32) for n in (queries, keys))
        return cls(cu_seq_q, cu_seq_k, max(queries), max(keys))

    def documents(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each."""
        ends = (list(map(slice, cu_seq[:-1].tolist(), cu_seq[1:].tolist())) for cu_seq in self[:2])
        return list(zip(*ends, strict=True))


def random(spec: Spec, lengths: Lengths, heads: int, kv_heads: int) -> tuple[Inputs, Tensor]:
    """Normal numbers: the inputs of a call, (N, H, D) and not contiguous, and the gradient of the output."""
    generator, dtype = torch.Generator().manual_seed(0), TORCH_DTYPES[spec.dtype]
    total_q, total_k = map(sum, zip(*lengths, strict=True))

    def vectors(n: int, heads: int, width: int) -> Tensor:
        return torch.randn(heads, n, width, generator=generator).to(dtype).transpose(0, 1)

    q, k, v = (
        vectors(total_q, heads, spec.head_dim),
        vectors(total_k, kv_heads, spec.head_dim),
        vectors(total_k, kv_heads, spec.value_head_dim),
    )
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 / shape[-2] ** 0.5
        for name, shape in spec.weights(heads).items()
    }
    return Inputs(q, k, v, weights), vectors(total_q, heads, spec.value_head_dim)


def op(host: Mapping[str, Callable[..., Any]], spec: Spec, packed: Packed, **options: Any) -> Callable[..., Any]:
    """Host functions as a differentiable op: (q, k, v, weights by name) -> (out, lse).

    Args:
        host: the forward and the backward pass.
        spec: what they compute.
        packed: the documents.
        options: for the backward pass.
    """
    scale = spec.head_dim**-0.5

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *operands: Tensor) -> Any:
            out, lse = host["forward"](*operands, scale, *packed)
            context.save_for_backward(*operands, out, lse)
            return out, lse

        @staticmethod
        def backward(context: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
            saved = context.saved_tensors
            return host["backward"](grad_out.contiguous(), grad_lse.contiguous(), *saved, scale, *packed, **options)

    def call(q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> Any:
        taps = weights or {"weight": torch.ones(q.shape[1], 1, 1)}  # plain attention is a convolution by a single tap
        return Attention.apply(q, k, v, *taps.values())

    return call


def reference(spec: Spec, packed: Packed) -> Callable[..., Any]:
    """The same in plain PyTorch, document by document."""
    eager = eager_op(spec, return_lse=True)

    def call(q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for queries, keys in packed.documents():
            own = [x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys])]
            rows = own[0].shape[:3]
            if own[1].shape[2] and rows[2]:
                out, lse = eager(*own, **weights)
            else:
                out, lse = q.new_zeros(*rows, spec.value_head_dim), q.new_full(rows, -torch.inf)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    return call


def failures(
    host: Mapping[str, Callable[..., Any]], spec: Spec, lengths: Lengths, heads: int, kv_heads: int
) -> list[str]:
    """Results and gradients that break the accuracy rule, a line each.

    Gradients come through the output and through the log-sum-exp, which is its last column.
    """
    packed, (inputs, grad_out) = Packed.of(lengths), random(spec, lengths, heads, kv_heads)
    grad_out = torch.cat([grad_out, grad_out[..., :1]], -1)

    def with_lse(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(*qkv: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = function(*qkv, **weights)
            column = lse.masked_fill(lse == -torch.inf, 0).to(out.dtype).T.unsqueeze(-1)
            return torch.cat([out, column], -1), lse

        return run

    judged = judge(with_lse(op(host, spec, packed)), with_lse(reference(spec, packed)), inputs, grad_out)
    return [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]


def leaks(
    host: Mapping[str, Callable[..., Any]], spec: Spec, lengths: Lengths, heads: int, kv_heads: int, own: int = 1
) -> list[str]:
    """Results of a document that are other bits among others, which hold no numbers, than alone.

    Args:
        host: the forward and the backward pass.
        spec: what they compute.
        lengths: of the documents.
        heads: of queries.
        kv_heads: of keys.
        own: the document.
    """
    packed, (inputs, grad_out) = Packed.of(lengths), random(spec, lengths, heads, kv_heads)
    queries, keys = packed.documents()[own]
    scale = spec.head_dim**-0.5

    def results(documents: Packed, *tensors: Tensor) -> tuple[Tensor, ...]:
        *qkv, grad = tensors
        operands = (*qkv, *inputs.weights.values())
        out, lse = host["forward"](*operands, scale, *documents)
        grad_lse = grad[..., 0].float().T.contiguous()
        return out, lse.T, *host["backward"](grad, grad_lse, *operands, out, lse, scale, *documents)[:3]

    def spoilt(x: Tensor, rows: slice) -> Tensor:
        infinite = torch.arange(len(x))[:, None, None] % 2 == 0
        others = torch.where(infinite, torch.inf, torch.nan).to(x.dtype).repeat(1, *x.shape[1:])
        others[rows] = x[rows]
        return others

    tensors = ((inputs.q, queries), (inputs.k, keys), (inputs.v, keys), (grad_out, queries))
    alone = results(Packed.of([lengths[own]]), *(x[rows] for x, rows in tensors))
    among = results(packed, *(spoilt(x, rows) for x, rows in tensors))
    owners = {"out": queries, "lse": queries, "dq": queries, "dk": keys, "dv": keys}
    found = zip(owners.items(), alone, among, strict=True)
    return [name for (name, rows), one, others in found if not torch.equal(one, others[rows])]
