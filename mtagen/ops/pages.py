"""Calls on keys and values that lie in pages, turned into calls on packed documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import check_dense
from ..call import Documents, document_of
from ..errors import InputError, explain
from ..spec import Spec
from .checks import check_boundaries, check_packed, check_slots, is_length

SMALLEST_PAGE = 16  # tokens, on a GPU


class Pages(NamedTuple):
    """Where the requests of a call lie.

    Attributes:
        block_table: (requests, width) int32, the pages of each request in order.
        cu_seq_q: (requests + 1,) int32, where the rows of each request begin among the queries; None if
            each has ``max_q`` rows.
        lengths: (requests,) int32, keys of each request.
        max_q: rows of the longest request, or more.
        max_k: keys of the longest request, or more.
    """

    block_table: Tensor
    cu_seq_q: Tensor | None
    lengths: Tensor
    max_q: int
    max_k: int

    @property
    def boundaries(self) -> Tensor:
        """Where the rows of each request begin, and where those of the last end."""
        if self.cu_seq_q is not None:
            return self.cu_seq_q
        requests = torch.arange(len(self.lengths) + 1, device=self.lengths.device, dtype=torch.int32)
        return requests * self.max_q


def check_paged(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    weights: Sequence[Tensor | None],
    sink: Tensor | None,
    parameters: Mapping[str, Tensor] | None,
    pages: Pages,
) -> list[Tensor | None]:
    """Check a call on pages: q (total, H, D), k_pages (pages, size, Hkv, D), v_pages (pages, size, Hkv, DV).

    Returns:
        The weights, the sink and the parameters, as registered ops take them.

    Raises:
        InputError: some argument does not fit. The values of tables and lengths are checked on the
            CPU only.
    """
    if spec.right != 0:
        rule = "a request's queries would see keys that later steps write"
        raise InputError(explain("causal", False, rule, "an op whose queries see no later keys"))
    if tokens := [name for name, axes in spec.parameters if {"i", "j"} & {*axes.split(",")}]:
        rule = "has an axis of tokens, and parameters do not lie in pages"
        raise InputError(
            explain(f"parameters[{tokens[0]!r}]", dict(spec.parameters)[tokens[0]], rule, "b, h and numbers")
        )
    named = (("k_pages", k_pages), ("v_pages", v_pages))
    check_dense(named)
    for name, x in named:
        if x.ndim != 4:
            raise InputError(explain(f"{name}.shape", tuple(x.shape), "must have four axes", "(pages, size, Hkv, D)"))
    if k_pages.shape[:2] != v_pages.shape[:2]:
        got = tuple(k_pages.shape[:2]), tuple(v_pages.shape[:2])
        raise InputError(explain("k_pages, v_pages", got, "must have the same pages", "two equal (pages, size)"))
    size = k_pages.shape[1]
    check_page_size(size, q.device.type)
    checked = check_packed(spec, dtypes, q, k_pages[:, 0], v_pages[:, 0], weights)
    _check_requests(pages, size, len(k_pages), q, spec.context)
    checked += check_slots(spec, q, k_pages[:, 0], sink, parameters, len(pages.lengths))
    given = [q, k_pages, v_pages, *(x for x in checked if x is not None)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        rule = "calls on pages compute no gradients"
        raise InputError(explain("gradients", "enabled", rule, "torch.inference_mode(), torch.no_grad(), or op.varlen"))
    return checked


def check_page_size(size: int, device_type: str) -> None:
    """Check the tokens of a page, for a type of device such as ``cuda``.

    Raises:
        InputError: they are no power of two, or too few.
    """
    least = 1 if device_type == "cpu" else SMALLEST_PAGE
    if size < least or size & (size - 1):
        legal = ", ".join(str(least * 2**i) for i in range(3))
        raise InputError(explain("page size", size, f"must be a power of two, at least {least}", f"{legal}, ..."))


def _check_requests(pages: Pages, size: int, count: int, q: Tensor, context: int) -> None:
    """Check the table, boundaries and lengths of a call whose ``count`` pages have ``size`` tokens each."""
    table, cu_seq_q, lengths, max_q, max_k = pages
    check_dense((("block_table", table), ("lengths", lengths)))
    if cu_seq_q is not None:
        check_boundaries(("cu_seq_q", cu_seq_q), ("max_q", max_q), len(q), q.device)
    requests = lengths.numel() if cu_seq_q is None else len(cu_seq_q) - 1
    for name, x, shape in (("lengths", lengths, (requests,)), ("block_table", table, (requests, "width"))):
        fits = x.ndim == len(shape) and len(x) == requests
        if not (fits and x.dtype == torch.int32 and x.device == q.device):
            got, legal = (tuple(x.shape), x.dtype, x.device), f"shape {shape}, torch.int32, {q.device}"
            raise InputError(explain(name, got, "must have an entry for each request, on q's device", legal))
    if cu_seq_q is None and not (is_length(max_q) and len(q) == requests * max_q):
        rule = f"without cu_seq_q each of {requests} requests has max_q={max_q} rows"
        raise InputError(explain("rows of q", len(q), rule, "requests * max_q, or cu_seq_q=..."))
    room = table.shape[1] * size
    if not (is_length(max_k) and max_k <= room):
        rule = f"must be at least the longest request's keys; {table.shape[1]} pages of {size} tokens hold {room}"
        raise InputError(explain("max_k", max_k, rule, f"0..{room}"))
    if len(q) < requests * context:
        rule = f"must hold {context} earlier queries for each of {requests} requests"
        raise InputError(explain("rows of q", len(q), rule, f"{requests * context} or more"))
    if not (q.is_cpu and type(q) is Tensor and not torch.compiler.is_compiling()):
        return
    for request, (rows, keys) in enumerate(zip(pages.boundaries.diff().tolist(), lengths.tolist(), strict=True)):
        if not 0 <= keys <= max_k:
            raise InputError(explain(f"lengths[{request}]", keys, "must be a number of keys", f"0..{max_k}"))
        if rows < context or (keys and rows > context + keys):
            rule = f"a request has {context} earlier rows, then at most one new row for each of its {keys} keys"
            raise InputError(explain(f"rows of request {request}", rows, rule, f"{context}..{context + keys}"))
        used = table[request, : -(-keys // size)].tolist()
        if wrong := [page for page in used if not 0 <= page < count]:
            raise InputError(explain(f"block_table[{request}]", wrong[0], "must be a page", f"0..{count - 1}"))


def as_documents(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Pages, context: int
) -> tuple[Tensor, Tensor, Tensor, Documents]:
    """Return q, and keys and values copied from their pages, as packed documents.

    Earlier queries before a request's start become zeros. On a GPU the copies have room for ``max_k``
    keys of each request, so that their shape does not depend on lengths, and a CUDA graph can be
    replayed with others.
    """
    table, _, lengths, max_q, max_k = pages
    size, requests, cu_seq_q = k_pages.shape[1], len(lengths), pages.boundaries
    ends = lengths.cumsum(0, dtype=torch.int32)
    cu_seq_k = torch.cat([ends.new_zeros(1), ends])
    total = int(ends[-1:].sum()) if q.is_cpu else requests * max_k
    rows = torch.arange(total, device=q.device, dtype=torch.int32)
    request = document_of(cu_seq_k, rows)
    place = torch.where(rows < cu_seq_k[-1], rows - cu_seq_k[request], 0)
    page = torch.where(rows < cu_seq_k[-1], table[request, place // size], 0)  # rows behind the last are padding
    k, v = (x[page, place % size] for x in (k_pages, v_pages))
    if context and requests:
        row = torch.arange(len(q), device=q.device, dtype=torch.int32)
        owner = document_of(cu_seq_q, row)
        before = lengths[owner] < cu_seq_q[1:][owner] - row
        q = q.masked_fill(before[:, None, None], 0)
    return q, k, v, Documents(cu_seq_q, cu_seq_k, max_q, max_k)


def as_caches(k_pages: Tensor, v_pages: Tensor, pages: Pages) -> list[Tensor]:
    """Return keys and values copied from their pages to caches (requests, Hkv, max_k, D)."""
    size = k_pages.shape[1]
    place = torch.arange(pages.max_k, device=k_pages.device, dtype=torch.int32)
    page = torch.where(place < pages.lengths[:, None], pages.block_table[:, place // size], 0)
    return [x[page, place % size].transpose(1, 2) for x in (k_pages, v_pages)]


def new_rows(cu_seq_q: Tensor, total: int, context: int) -> Tensor:
    """Return the rows of the new queries among ``total`` rows; a request's first ``context`` rows are earlier ones."""
    requests = len(cu_seq_q) - 1
    numbers = torch.arange(requests + 1, device=cu_seq_q.device, dtype=torch.int32)
    rows = torch.arange(total - requests * context, device=cu_seq_q.device, dtype=torch.int32)
    return rows + (document_of(cu_seq_q - numbers * context, rows) + 1) * context
