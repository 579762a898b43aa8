"""Calls that differ in what the mask hides, and the results that must have the same bits in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mtagen.planner.geometry.mask import Mask
from mtagen.spec import Spec


class Call(NamedTuple):
    """Tensors of one call, (B, H, N, D). ``grad_out`` is the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class Edge(NamedTuple):
    """An edge of the mask.

    Attributes:
        name: what the mask hides there.
        keys: (N_k), the keys that are hidden from all kept rows.
        queries: (N_q), the queries that no kept result depends on.
        kept: name of a result -> (N_q) or (N_k), its rows that depend on neither.
    """

    name: str
    keys: Tensor
    queries: Tensor
    kept: Mapping[str, Tensor]


def edges(spec: Spec, n_q: int, n_k: int, cut: int) -> Iterator[Edge]:
    """Each edge of a mask, at the key ``cut``.

    The output of a query depends on the ``spec.context`` queries before it, so the gradient of a query depends on as
    many outputs after it.
    """
    keys, positions, context = torch.arange(n_k), torch.arange(n_q) + n_k - n_q, spec.context
    if spec.right is not None:
        last = cut - 1 - spec.right
        kept = {"out": positions <= last, "lse": positions <= last, "dq": positions <= last - context}
        if spec.left is not None:
            kept |= dict.fromkeys(("dk", "dv"), keys + spec.left + context <= last)
        yield Edge("later keys", keys >= cut, positions > last, kept)
        kept = dict.fromkeys(("dk", "dv"), keys >= cut)
        yield Edge("earlier rows", keys < 0, positions <= last - context, kept)
    if spec.left is not None:
        # An output has terms of earlier rows, with the keys that these rows see, unless its own mask decides.
        own_mask = Mask.of(spec).zeroes_terms and not spec.post_kernel
        first = cut + spec.left + (0 if own_mask else context)
        kept = dict.fromkeys(("out", "lse", "dq"), positions >= first)
        if spec.right is not None:
            kept |= dict.fromkeys(("dk", "dv"), keys - spec.right >= first)
        yield Edge("earlier keys", keys < cut, positions < first - context, kept)


def changed(x: Tensor, rows: Tensor, factor: float | None) -> Tensor:
    """``x``, whose rows are multiplied by ``factor``; without one they become infinite, or NaN every other one."""
    odd = torch.arange(len(rows))[:, None] % 2 == 1
    other = x.masked_fill(odd, torch.nan).masked_fill(~odd, torch.inf) if factor is None else x * factor
    return torch.where(rows[:, None], other, x)


def failures(results: Callable[[Call], Mapping[str, Tensor]], call: Call, edge: Edge) -> list[str]:
    """Results that are not the same bits whatever the mask hides, a line each.

    Hidden keys, values, queries and gradients are multiplied by 100 and by 10,000, together and keys and values alone.
    Then keys are infinite or NaN; gradients, which multiply them by zeros, are then not compared.

    Args:
        results: name -> result of a call, (B, H, N, ...).
        call: ordinary numbers.
        edge: the edge.
    """
    expected, found = results(call), []
    for name, rows in edge.kept.items():
        assert name not in expected or (rows.any() and expected[name][:, :, rows].isfinite().all())
    for factor in (100.0, 10_000.0, None):
        k, v = changed(call.k, edge.keys, factor), call.v if factor is None else changed(call.v, edge.keys, factor)
        calls = {"keys": call._replace(k=k, v=v)}
        if factor:
            q, grad_out = (changed(x, edge.queries, factor) for x in (call.q, call.grad_out))
            calls["all"] = Call(q, k, v, grad_out)
        for what, other in calls.items():
            ours = results(other)
            for name, rows in edge.kept.items():
                if name in ours and (factor or name in ("out", "lse")):
                    different = (ours[name] != expected[name])[:, :, rows]
                    if different.any():
                        found.append(f"{edge.name}: {name} by {what} times {factor}, {different.sum()} numbers")
    return found
