"""Calls that differ in what the mask hides, and the results that must have the same bits in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.planner.geometry.mask import Mask
from mtagen.spec import Spec

WINDOWS: dict[str, dict[str, Any]] = {  # edges of masks, by name
    "causal": {},
    "causal by its window": {"causal": False, "window": (-1, 0)},
    "later edge": {"causal": False, "window": (-1, 4)},
    "left edge": {"causal": False, "window": (9, -1)},
    "sliding": {"window": (9, -1)},
    "both edges": {"causal": False, "window": (7, 3)},
    "narrow": {"causal": False, "window": (1, 1)},
}
PIPELINES: dict[str, dict[str, Any]] = {  # stages, by name
    "plain": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "convolution of more queries than keys": {"kernel": (5, 2)},
    "paper": {"kernel": (6, 11)},
    "output": {"kernel": (3, 4), "mask": "output"},
    "slopes before": {"kernel": (3, 4), "scores": "s - (i - j) / 8"},
    "pairs after": {"kernel": None, "post_mixed_heads": 2},
    "mixed": {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2},
    "all": {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 2},
}

NOT_FINITE = "keys that are infinite or NaN"


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

    def times(self, call: Call, factor: float, names: Iterable[str] = Call._fields) -> Call:
        """Multiply the rows of some tensors that are hidden or that no kept result depends on."""
        rows = Call(self.queries, self.keys, self.keys, self.queries)
        return call._replace(**{name: changed(getattr(call, name), getattr(rows, name), factor) for name in names})


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


def failures(results: Callable[[Call], Mapping[str, Tensor]], call: Call, edges: Iterable[Edge]) -> list[str]:
    """Results that are not the same bits whatever the mask hides at some edges, a line each.

    Hidden keys and values are multiplied by 100; then these and hidden queries and gradients by 10,000. Then keys are
    infinite or NaN; gradients, which multiply them by zeros, are then not compared. Keys alone are not scaled by
    10,000: a leak of keys shows at 100, and each call takes seconds in an interpreter.

    Args:
        results: name -> result of a call, (B, H, N, ...).
        call: ordinary numbers.
        edges: the edges.
    """
    expected, found, edges = results(call), [], [*edges]
    assert any(edge.kept.keys() & expected.keys() for edge in edges)
    for edge in edges:
        for name, rows in edge.kept.items():
            assert name not in expected or (rows.any() and expected[name][:, :, rows].isfinite().all())
        calls = {
            "keys and values times 100": edge.times(call, 100.0, ("k", "v")),
            "all times 10,000": edge.times(call, 10_000.0),
            NOT_FINITE: call._replace(k=changed(call.k, edge.keys, None)),
        }
        for what, other in calls.items():
            ours = results(other)
            for name, rows in edge.kept.items():
                if name in ours and (what != NOT_FINITE or name in ("out", "lse")):
                    different = (ours[name] != expected[name])[:, :, rows]
                    if different.any():
                        found.append(f"{edge.name}: {name} by {what}, {different.sum()} numbers")
    return found


def training_failures(op: Any, n_q: int, n_k: int, cut: int, device: str = "cpu", heads: int = 2) -> list[str]:
    """What of an op's results and gradients shows hidden numbers, at each edge of its mask.

    Args:
        op: what ``mtagen.build`` returns.
        n_q, n_k: how many queries and keys there are.
        cut: a key that is seen by some queries and hidden from others, see :func:`edges`.
        device: where the tensors are.
        heads: of queries; each two share a head of keys.
    """
    spec = op.plan.spec
    sampler = Sampler.for_checks(spec, Sizes(1, heads, heads // 2, n_q, n_k), torch.device("cpu"))
    inputs, grad_out = sampler.inputs(), sampler.outputs()
    weights = {name: weight.to(device) for name, weight in inputs.weights.items()}

    def results(call: Call) -> dict[str, Tensor]:
        q, k, v, grad_out = (x.to(device) for x in call)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = op(*leaves, **weights, return_lse=True)
        made = (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out))
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (x.cpu() for x in made), strict=True))

    return failures(results, Call(inputs.q, inputs.k, inputs.v, grad_out), edges(spec, n_q, n_k, cut))


def decode_failures(op: Any, capacity: int, length: int, new: int, device: str = "cpu", heads: int = 2) -> list[str]:
    """What of an op's decode step shows keys past those in use, later than a new token, or before all windows."""
    spec, found = op.plan.spec, []
    sampler = Sampler.for_checks(spec, Sizes(1, heads, heads // 2, new, capacity), torch.device("cpu"))
    inputs, keys = sampler.inputs(decode=True), torch.arange(capacity)
    weights = {name: weight.to(device) for name, weight in inputs.weights.items()}
    seqlens = torch.tensor([length], dtype=torch.int32, device=device)

    def results(k: Tensor, v: Tensor) -> list[Tensor]:
        q, k, v = (x.to(device) for x in (inputs.q, k, v))
        made = op.decode(q, k, v, **weights, cache_seqlens=seqlens, return_lse=True)
        return [x.cpu() for x in made]

    edges = {"past those in use": (keys >= length, slice(None))}
    if spec.right is not None:
        edges["later"] = (keys >= length - 1 + spec.right, slice(0, new - 1))
    if spec.left is not None:
        edges["earlier"] = (keys < length - new - spec.context - spec.left, slice(None))
    expected = results(inputs.k, inputs.v)
    assert all(x.isfinite().all() for x in expected)
    for edge, (hidden, tokens) in edges.items():
        for factor in (100.0, 10_000.0, None):
            is_read = factor is None and edge != "past those in use"  # and multiplied by a probability of 0
            v = inputs.v if is_read else changed(inputs.v, hidden, factor)
            ours = results(changed(inputs.k, hidden, factor), v)
            if not all(torch.equal(a[:, :, tokens], b[:, :, tokens]) for a, b in zip(ours, expected, strict=True)):
                found.append(f"keys {edge} times {factor}")
    return found


def document_failures(op: Any, device: str = "cpu", heads: int = 2) -> list[str]:
    """What of a packed document's results shows the documents beside it."""
    spec, lengths, own = op.plan.spec, torch.tensor([0, 40, 103, 130], dtype=torch.int32), slice(40, 103)
    sampler = Sampler.for_checks(spec, Sizes(1, heads, heads // 2, 130, 130), torch.device("cpu"))
    inputs, grad_out = sampler.inputs(), sampler.outputs()
    weights = {name: weight.to(device) for name, weight in inputs.weights.items()}
    places = {"cu_seq_q": lengths.to(device), "cu_seq_k": lengths.to(device), "max_q": 63, "max_k": 63}
    others, found = torch.ones(130, dtype=torch.bool), []
    others[own] = False

    def results(*call: Tensor) -> list[Tensor]:
        *qkv, gradient = (x[0].transpose(0, 1).contiguous().to(device) for x in call)
        leaves = [x.requires_grad_() for x in qkv]
        out, lse = op.varlen(*leaves, **weights, **places, return_lse=True)
        return [x.detach()[own].cpu() for x in (out, lse.T, *torch.autograd.grad(out, leaves, gradient))]

    call = inputs.q, inputs.k, inputs.v, grad_out
    expected = results(*call)
    for factor in (100.0, 10_000.0, None):
        ours = results(*(changed(x, others, factor) for x in call))
        if not all(map(torch.equal, ours, expected)):
            found.append(f"other documents times {factor}")
    return found
