"""Host functions of kernels for packed documents, called directly, on random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtagen.call import Documents
from mtagen.dropout import Dropout, dropout_mask
from mtagen.dtypes import TORCH_DTYPES
from mtagen.measure.inputs import Inputs
from mtagen.measure.judge import documents_op, eager_op, judge
from mtagen.spec import Spec

Lengths = Sequence[tuple[int, int]]  # queries and keys of each document


def packed(lengths: Lengths) -> Documents:
    """Documents of these lengths."""
    queries, keys = zip((0, 0), *lengths, strict=True)
    cu_seq_q, cu_seq_k = (torch.tensor(n).cumsum(0).to(torch.int32) for n in (queries, keys))
    return Documents(cu_seq_q, cu_seq_k, max(queries), max(keys))


def rows_of(documents: Documents, document: int) -> tuple[slice, slice]:
    """The queries and the keys of a document."""
    queries, keys = (slice(*cu_seq[document : document + 2].tolist()) for cu_seq in documents[:2])
    return queries, keys


def random(spec: Spec, lengths: Lengths, heads: int, kv_heads: int) -> tuple[Inputs, Tensor]:
    """Normal numbers: the inputs of a call, (N, H, D) and not contiguous, and the gradient of the output."""
    generator, dtype = torch.Generator().manual_seed(0), TORCH_DTYPES[spec.dtype]
    total_q, total_k = map(sum, zip(*lengths, strict=True))

    def vectors(n: int, heads: int, width: int) -> Tensor:
        return torch.randn(heads, n, width, generator=generator).to(dtype).transpose(0, 1)

    q, k = vectors(total_q, heads, spec.head_dim), vectors(total_k, kv_heads, spec.head_dim)
    v, grad_out = vectors(total_k, kv_heads, spec.value_head_dim), vectors(total_q, heads, spec.value_head_dim)
    weights = {
        name: torch.randn(shape, generator=generator) / math.prod(shape[1:]) ** 0.5
        for name, shape in spec.weights(heads).items()
    }
    sizes = {"H": heads, "total_k": total_k, "documents": len(lengths)}
    learned = {x.name: torch.randn(x.extents(sizes), generator=generator) for x in spec.packed_learned_arguments}
    weights |= {"sink": learned.pop("sink")} if spec.sink else {}
    without_gradients = [x.name for x in spec.packed_learned_arguments if not x.differentiable]
    return Inputs(q, k, v, weights, learned, dict(spec.parameters), without_gradients), grad_out


def op(
    host: Mapping[str, Callable[..., Any]], spec: Spec, documents: Documents | tuple[()], dropout: Dropout | None
) -> Callable[..., Any]:
    """The host functions of both passes as a differentiable op: (q, k, v, weights by name) -> (out, lse)."""
    call_options = (spec.head_dim**-0.5, *documents, *(dropout or ()))

    # A single tap is an operand, too.
    have_gradients = (True,) * (not spec.weight_names) + spec.have_gradients

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *operands: Tensor) -> Any:
            out, lse = host["forward"](*operands, *call_options)
            context.save_for_backward(*operands, out, lse)
            return out, lse

        @staticmethod
        def backward(context: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
            given = grad_out.contiguous(), grad_lse.contiguous()
            grads = iter(host["backward"](*given, *context.saved_tensors, *call_options))
            return tuple(next(grads) if has else None for has in have_gradients)

    of_tokens = {name for name, axes in spec.parameters if {"i", "j"} & set(axes.split(","))}

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Any = None, parameters: Any = None, **weights: Tensor) -> Any:
        taps = weights or {"weight": torch.ones(q.shape[1], 1, 1)}  # plain attention is a convolution by a single tap
        learned = [] if sink is None else [sink]
        for name, x in (parameters or {}).items():
            learned.append(x.movedim(0, -1).contiguous() if name in of_tokens else x)
        return Attention.apply(q, k, v, *taps.values(), *learned)

    return call


def with_rest(host: Mapping[str, Callable[..., Any]], n_q: int = 150, n_k: int = 70) -> dict[str, Callable[..., Any]]:
    """Host functions of both passes that are called with so many rows of NaN behind the last document.

    They return the rows of the documents, after a look at the others: zeros, and log-sum-exps of -inf.
    """

    def more(x: Tensor, rows: int) -> Tensor:
        return torch.cat([x, x.new_full((rows, *x.shape[1:]), torch.nan)])

    def more_tokens(x: Any, tokens: int) -> Any:
        """The same of an argument's last axis, if it is a parameter of tokens."""
        is_parameter = isinstance(x, Tensor) and x.shape[-1] == tokens
        return more(x.movedim(-1, 0), n_k).movedim(0, -1).contiguous() if is_parameter else x

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        given = [more_tokens(x, len(k)) for x in rest]
        out, lse = host["forward"](more(q, n_q), more(k, n_k), more(v, n_k), *given)
        assert not out[len(q) :].count_nonzero()
        assert (lse[:, len(q) :] == -torch.inf).all()
        return out[: len(q)], lse[:, : len(q)]

    def backward(grad: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        at = next(at for at, x in enumerate(rest) if not isinstance(x, Tensor))  # behind weights, out and lse
        *weights, out, lse = rest[:at]
        out = torch.cat([out, out.new_zeros(n_q, *out.shape[1:])])
        lse = torch.cat([lse, lse.new_full((len(lse), n_q), -torch.inf)], 1)
        grads = more(grad, n_q), more(grad_lse.T, n_q).T.contiguous()
        given = [more_tokens(x, len(k)) for x in weights]
        tensors = (more(q, n_q), more(k, n_k), more(v, n_k), *given, out, lse)
        dq, dk, dv, *dgiven = host["backward"](*grads, *tensors, *rest[at:], **options)
        for dx, x in ((dq, q), (dk, k), (dv, v)):
            assert not dx[len(x) :].count_nonzero()
        dweights = []
        for dx, x in zip(dgiven, weights, strict=True):
            dweights.append(dx[..., : x.shape[-1]])
            assert not dx[..., x.shape[-1] :].count_nonzero()
        return dq[: len(q)], dk[: len(k)], dv[: len(k)], *dweights

    return {"forward": forward, "backward": backward}


def failures(
    host: Mapping[str, Callable[..., Any]],
    spec: Spec,
    lengths: Lengths,
    heads: int,
    kv_heads: int,
    dropout: Dropout | None = None,
) -> list[str]:
    """Results, and gradients if there is a backward pass, that break the accuracy rule, a line each.

    Gradients come through the output and through the log-sum-exp, which is its last column. ``dropout`` is what host
    functions of a spec with dropout are told.
    """
    inputs, grad_out = random(spec, lengths, heads, kv_heads)
    grad = torch.cat([grad_out, grad_out[..., :1]], -1) if "backward" in host else None

    def with_lse(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(*qkv: Tensor, **weights: Any) -> tuple[Tensor, Tensor]:
            out, lse = function(*qkv, **weights)
            column = lse.masked_fill(lse == -torch.inf, 0).to(out.dtype).T.unsqueeze(-1)
            return torch.cat([out, column], -1), lse

        return run

    def eager(*tensors: Tensor, document: int, **weights: Any) -> Any:
        options: dict[str, Any] = {}
        if dropout:
            n_q, n_k = lengths[document]
            mask = dropout_mask(*dropout, document + 1, heads, n_q, n_k)
            options = {"dropout_p": dropout.p, "dropout_mask": mask[document : document + 1]}
        return eager_op(spec, return_lse=True)(*tensors, **weights, **options)

    expected = documents_op(eager, *map(list, zip(*lengths, strict=True)), axes=inputs.axes)
    judged = judge(with_lse(op(host, spec, packed(lengths), dropout)), with_lse(expected), inputs, grad)
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
    inputs, grad_out = random(spec, lengths, heads, kv_heads)
    queries, keys = rows_of(packed(lengths), own)
    scale = spec.head_dim**-0.5

    def results(documents: Documents, *tensors: Tensor) -> tuple[Tensor, ...]:
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
    alone = results(packed([lengths[own]]), *(x[rows] for x, rows in tensors))
    among = results(packed(lengths), *(spoilt(x, rows) for x, rows in tensors))
    owners = {"out": queries, "lse": queries, "dq": queries, "dk": keys, "dv": keys}
    found = zip(owners.items(), alone, among, strict=True)
    return [name for (name, rows), one, others in found if not torch.equal(one, others[rows])]
