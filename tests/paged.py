"""Requests whose keys and values lie in pages, in random order, among pages and slots that hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mtagen
from mtagen.ops.attention import AttentionOp
from mtagen.spec import MAX_NEW_TOKENS, Spec

Requests = Sequence[tuple[int, int]]  # new queries and keys of each
UNUSED = 10**6  # an entry of a table that is no page


class Paged(NamedTuple):
    """A call on pages.

    Attributes:
        arguments: what :meth:`AttentionOp.paged` takes.
        sequences: q, k and v (N, heads, D) of each request.
        weights: the weights of the op's stages.
    """

    arguments: dict[str, Any]
    sequences: list[tuple[Tensor, Tensor, Tensor]]
    weights: dict[str, Tensor]


def draw(
    spec: Spec,
    requests: Requests,
    size: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    spare_pages: int = 3,
) -> Paged:
    """Draw requests. Numbers follow from ``seed``, and the order of pages is random."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    widths = ((heads, spec.head_dim), (kv_heads, spec.head_dim), (kv_heads, spec.value_head_dim))
    sequences = [tuple(normal(keys, *width) for width in widths) for _, keys in requests]
    weights = {name: normal(*shape) / 4 for name, shape in spec.weights(heads).items()}
    weights = {name: x.to(device, dtype if dtype == torch.float64 else torch.float32) for name, x in weights.items()}
    used = [-(-keys // size) for _, keys in requests]
    order = torch.randperm(sum(used) + spare_pages, generator=generator)[: sum(used)].split(used)
    table = torch.full((len(requests), max(used) + 1), UNUSED, dtype=torch.int32)
    pages = [torch.full((sum(used) + spare_pages, size, *width), torch.nan, dtype=dtype) for width in widths[1:]]
    rows = []
    for number, ((new, keys), (q, *stored), mine) in enumerate(zip(requests, sequences, order, strict=True)):
        table[number, : len(mine)] = mine
        place = torch.arange(keys)
        for held, x in zip(pages, stored, strict=True):
            held[mine[place // size], place % size] = x.to(dtype)
        before = torch.full((spec.context, *q.shape[1:]), torch.nan, dtype=torch.float64)
        rows.append(torch.cat([before, q])[keys - new :])
    counts = [spec.context + new for new, _ in requests]
    arguments: dict[str, Any] = {
        "q": torch.cat(rows).to(dtype),
        "k_pages": pages[0],
        "v_pages": pages[1],
        "block_table": table,
        "cu_seq_q": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        "lengths": torch.tensor([keys for _, keys in requests], dtype=torch.int32),
    }
    arguments = {name: x.to(device) for name, x in arguments.items()}
    arguments |= {"max_q": max(counts), "max_k": max(keys for _, keys in requests)}
    return Paged(arguments | weights, sequences, weights)


def expected(spec: Spec, requests: Requests, given: Paged) -> Tensor:
    """Return the outputs of the new queries by the reference in float64, one request after another."""
    options = spec.to_dict()
    stages = {name: options[name] for name in ("window", "causal", "key_padding", "mask", "logits")}
    outs = []
    for (new, keys), tensors in zip(requests, given.sequences, strict=True):
        if not new:
            continue
        q, k, v = (x.transpose(0, 1)[None].to(given.arguments["q"].dtype).double() for x in tensors)
        weights = {name: x.cpu().double() for name, x in given.weights.items()}
        out = mtagen.reference(q, k, v, **weights, **stages)
        outs.append(out[0, :, keys - new :].transpose(0, 1))
    return torch.cat(outs)


def contiguous(op: AttentionOp, given: Paged, num_splits: int | None = None) -> Tensor:
    """Return the same outputs by ``decode`` for requests with 1 to 8 new queries, and by ``varlen`` for the others.

    Keys and values lie one after another.
    """
    arguments, context = given.arguments, op.plan.spec.context
    counts = (arguments["cu_seq_q"].diff() - context).tolist()
    few = [1 <= count <= MAX_NEW_TOKENS for count in counts]
    steps = _by_decode(op, given, min(MAX_NEW_TOKENS, max(counts)), num_splits) if any(few) else None
    chunks = None if all(few) else _by_varlen(op, given)
    rows = []
    for number, (count, is_step) in enumerate(zip(counts, few, strict=True)):
        rows.append(steps[number, -count:] if is_step else chunks[number][context:])
    return torch.cat(rows)


def _by_decode(op: AttentionOp, given: Paged, new: int, num_splits: int | None) -> Tensor:
    """Return the outputs of the last ``new`` queries of each request, (requests, new, H, DV)."""
    arguments, spec = given.arguments, op.plan.spec
    q, lengths = arguments["q"], arguments["lengths"]
    shape = (len(lengths), spec.context + new, *q.shape[1:])
    tail = torch.zeros(shape, dtype=q.dtype, device=q.device)
    caches = [
        torch.full(
            (len(lengths), x.shape[2], arguments["max_k"], x.shape[3]), torch.nan, dtype=q.dtype, device=q.device
        )
        for x in (arguments["k_pages"], arguments["v_pages"])
    ]
    for number, ((begin, end), (_, *stored)) in enumerate(
        zip(pairwise(arguments["cu_seq_q"].tolist()), given.sequences, strict=True)
    ):
        rows = q[begin:end][-shape[1] :]
        tail[number, shape[1] - len(rows) :] = rows
        for cache, x in zip(caches, stored, strict=True):
            cache[number, :, : len(x)] = x.transpose(0, 1)
    out = op.decode(tail.transpose(1, 2), *caches, **given.weights, cache_seqlens=lengths, num_splits=num_splits)
    return out.transpose(1, 2)


def _by_varlen(op: AttentionOp, given: Paged) -> Sequence[Tensor]:
    """Return the outputs of all rows of each request."""
    arguments = given.arguments
    dtype, device = arguments["q"].dtype, arguments["q"].device
    k, v = (torch.cat([x[i] for x in given.sequences]).to(device, dtype) for i in (1, 2))
    lengths = arguments["lengths"].cumsum(0, dtype=torch.int32)
    out = op.varlen(
        arguments["q"].nan_to_num(nan=0.0),
        k,
        v,
        **given.weights,
        cu_seq_q=arguments["cu_seq_q"],
        cu_seq_k=torch.cat([lengths.new_zeros(1), lengths]),
        max_q=arguments["max_q"],
        max_k=arguments["max_k"],
    )
    return out.split(arguments["cu_seq_q"].diff().tolist())


def assert_alone_alike(op: AttentionOp, given: Paged, **options: int) -> None:
    """Assert that each request alone, in a table of its own width, has the bits that it has among others."""
    context, arguments = op.plan.spec.context, given.arguments
    out = op.paged(**arguments, **options)
    starts = arguments["cu_seq_q"].tolist()
    for number, (begin, end) in enumerate(pairwise(starts)):
        if end - begin == context:
            continue
        one = {
            "q": arguments["q"][begin:end],
            "block_table": arguments["block_table"][number : number + 1],
            "cu_seq_q": torch.tensor([0, end - begin], dtype=torch.int32, device=out.device),
            "lengths": arguments["lengths"][number : number + 1],
            "max_q": end - begin,
        }
        alone = op.paged(**arguments | one, **options)
        first = begin - number * context
        assert torch.equal(alone, out[first : first + end - begin - context]), number
