"""Comparison of a pass's results with eager PyTorch and float64, by the rule of
:mod:`mtagen.accuracy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..accuracy import GRADIENT_FACTOR, Comparison, compare
from ..eager import reference
from ..spec import KEY_FACTORS, RULES, Spec
from .inputs import Inputs


def eager_op(spec: Spec, *, return_lse: bool = False) -> Callable[..., Any]:
    """Return :func:`mtagen.reference` for an operator: (q, k, v, weights by name) -> out, or (out,
    lse).
    """
    rules = {name: getattr(spec, name) for name in RULES}
    return partial(reference, **rules, return_lse=return_lse)


def documents_op(
    eager: Callable[..., Any], nq: list[int], nk: list[int], axes: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Return an operator on packed documents in plain PyTorch, which calls ``eager`` for each
    document.

    Args:
        eager: the operator on a batch of one sequence; returns (out, lse). Also takes ``document``,
            the number of the document.
        nq: queries of each document.
        nk: keys of each document.
        axes: the axes of each parameter of expressions.

    Returns:
        (q, k, v, weights by name) -> (out (total_q, H, DV), lse (H, total_q)), for q (total_q, H,
        D) and k, v likewise.
    """

    def parameter(name: str, x: Tensor, document: int) -> Tensor:
        """Return what a document reads of a parameter, in the shape for a batch of one."""
        letters = (axes or {})[name].split(",")
        if "i" in letters or "j" in letters:
            return torch.split(x, nk)[document].movedim(0, -1).unsqueeze(0)
        return x[document : document + 1] if "b" in letters else x

    def run(q: Tensor, k: Tensor, v: Tensor, **weights: Any) -> tuple[Tensor, Tensor]:
        parts, parameters = [], weights.pop("parameters", None)
        for document, rows in enumerate(zip(*(torch.split(x, n) for x, n in ((q, nq), (k, nk), (v, nk))), strict=True)):
            tensors = (x.transpose(0, 1).unsqueeze(0) for x in rows)
            if parameters:
                weights["parameters"] = {name: parameter(name, x, document) for name, x in parameters.items()}
            parts.append(eager(*tensors, document=document, **weights))
        return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)

    return run


def judge(
    function: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Inputs,
    grad_out: Tensor | None = None,
    *,
    size: float = 1.0,
) -> dict[str, Comparison]:
    """Compare the results of ``function``, and the gradients of its inputs, with ``eager``.

    Args:
        function: takes q, k, v, and the weights by name; returns out, or out and the log-sum-exp.
        eager: the same in plain PyTorch, which also takes float64.
        inputs: arguments of one call.
        grad_out: the gradient of out; None: no gradients are computed.
        size: magnitude of the terms that cancel in gradients, relative to normal numbers without
            dropout and with the default scale.

    Returns:
        ``out``, ``lse`` if the function returns it, and for each input its name with the prefix
        ``d``.
    """

    ours, plain = results(function, inputs, grad_out), results(eager, inputs, grad_out)
    exact = results(eager, inputs, grad_out, torch.float64)
    rules = _rules(inputs, size)
    return {name: rules[name](ours[name], plain[name], exact[name]) for name in exact}


def results(
    function: Callable[..., Any], inputs: Inputs, grad_out: Tensor | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the results of ``function`` and the gradients of its inputs, by :func:`judge`'s names.

    Args:
        function: see :func:`judge`.
        inputs: arguments of one call.
        grad_out: the gradient of out; None: no gradients are computed.
        dtype: dtype to which ``inputs`` are cast; by default they keep their dtype and layout.
    """
    tensors = {
        name: x.to(dtype or x.dtype).detach() if x.is_floating_point() else x for name, x in inputs.named.items()
    }
    leaves = {name: x for name, x in tensors.items() if name not in inputs.without_gradients}
    for x in leaves.values():
        x.requires_grad_(grad_out is not None)
    q, k, v, *_ = leaves.values()
    returned = function(q, k, v, **inputs.options(tensors))
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    named = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if grad_out is not None:
        # Where there are no rows or no keys, eager results may depend on no weight.
        gradients = torch.autograd.grad(out, [*leaves.values()], grad_out.to(out.dtype), materialize_grads=True)
        named |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return named


def _rules(inputs: Inputs, size: float) -> dict[str, Callable[..., Comparison]]:
    """Return the comparison of each result, by name."""
    q, k, v = inputs.q, inputs.k, inputs.v
    # The terms that cancel in a gradient through softmax are dot products of unit-normal vectors; in a weight's
    # gradient each is multiplied by a score.
    product = size * v.shape[-1] ** 0.5
    score = _largest(q.norm(dim=-1)) * _largest(k.norm(dim=-1)) * q.shape[-1] ** -0.5
    gradient = partial(compare, factor=GRADIENT_FACTOR)
    return {
        "out": partial(compare, terms=_largest(v.abs())),
        "lse": partial(compare, terms=1.0),  # the logarithm of a sum that is at least 1
        "dq": partial(gradient, terms=product),
        "dk": partial(gradient, terms=product),
        "dv": gradient,
        **{f"d{name}": partial(gradient, terms=score * product) for name in inputs.weights},
        **{f"d{name}": partial(gradient, terms=inputs.slopes.get(name, score) * product) for name in inputs.parameters},
    }


def _largest(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def judge_decode(
    decode: Callable[..., Any], eager: Callable[..., Any], inputs: Inputs, new_tokens: int
) -> dict[str, Comparison]:
    """Compare a decode step on caches of different lengths with ``eager`` on each sequence alone.

    Args:
        decode: a function like :meth:`mtagen.AttentionOp.decode`.
        eager: the operator in plain PyTorch; returns (out, lse).
        inputs: arguments of a decode step.
        new_tokens: number of the last rows of q, at most the number of keys.
    """
    q_tail, k, v = inputs.q, inputs.k, inputs.v
    batch, nk = k.shape[0], k.shape[2]
    lengths = torch.tensor([max(new_tokens, nk // (i + 1)) for i in range(batch)], dtype=torch.int32)

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Run ``eager`` on each sequence, without the queries before its first key, which do not
        exist.
        """
        parts = []
        for entry, (tail, keys, values, n) in enumerate(zip(q_tail, k, v, lengths.tolist(), strict=True)):
            tensors = (x.to(dtype).unsqueeze(0) for x in (tail[:, -n:], keys[:, :n], values[:, :n]))
            named = {name: inputs.part(name, x, entry, slice(0, n)) for name, x in inputs.named.items()}
            parts.append(eager(*tensors, **inputs.options(named)))
        out, lse = (torch.cat([x[:, :, -new_tokens:] for x in part]) for part in zip(*parts, strict=True))
        return out, lse

    # The content of a cache past its length must have no effect.
    stale = (torch.arange(nk) >= lengths[:, None])[:, None, :, None].to(k.device)
    k_cache, v_cache = (x.masked_fill(stale, torch.nan) for x in (k, v))
    cached = {name: x.masked_fill(stale, torch.nan) for name, x in inputs.weights.items() if name in KEY_FACTORS}
    options = inputs.options({**inputs.named, **cached}) | {"cache_seqlens": lengths.to(k.device), "return_lse": True}
    ours = decode(q_tail, k_cache, v_cache, **options)
    out, lse = zip(ours, run(q_tail.dtype), run(torch.float64), strict=True)
    return {
        "decode out": compare(*out, terms=v.abs().max().item()),
        "decode lse": compare(*lse),
    }
