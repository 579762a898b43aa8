"""Calls on keys and values in pages: checks, and the kernels for each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import check_dense
from ..call import Documents
from ..errors import InputError, explain
from ..spec import MAX_NEW_TOKENS, Spec, as_int
from .checks import check_boundaries, check_packed, check_slots, is_aligned, is_length, may_read
from .requests import divide

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
        InputError: some argument does not fit. The values of tables and lengths are checked if
            :func:`.checks.may_read`.
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
    if len(k_pages) == 0:
        raise InputError(explain("k_pages.shape", tuple(k_pages.shape), "must have a page", "1 or more pages"))
    size = k_pages.shape[1]
    check_page_size(size, q.device.type)
    if not q.is_cpu and (misplaced := [name for name, x in named if not is_aligned(x)]):
        strides = tuple(dict(named)[misplaced[0]].stride())
        rule = "rows must start at multiples of 16 bytes; pages are never copied"
        raise InputError(explain(f"strides of {misplaced[0]}", strides, rule, "contiguous pages, or a view of them"))
    checked = check_packed(spec, dtypes, q, k_pages[:, 0], v_pages[:, 0], weights)
    _check_requests(pages, size, len(k_pages), q, spec.context)
    checked += check_slots(spec, q, k_pages[:, 0], sink, parameters, len(pages.lengths))
    check_no_gradients([q, k_pages, v_pages, *checked])
    return checked


def check_no_gradients(tensors: Sequence[Tensor | None]) -> None:
    """Check that no gradients of a call are asked for.

    Raises:
        InputError: they are.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        rule = "calls on pages compute no gradients"
        raise InputError(explain("gradients", "enabled", rule, "torch.inference_mode(), torch.no_grad(), or op.varlen"))


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
    if not may_read(lengths):
        return
    check_table(table, lengths, size, count, max_k)
    for request, (rows, keys) in enumerate(zip(pages.boundaries.diff().tolist(), lengths.tolist(), strict=True)):
        if rows < context or (keys and rows > context + keys):
            rule = f"a request has {context} earlier rows, then at most one new row for each of its {keys} keys"
            raise InputError(explain(f"rows of request {request}", rows, rule, f"{context}..{context + keys}"))


def check_table(table: Tensor, lengths: Tensor, size: int, count: int, most: int) -> None:
    """Check what a table of pages and lengths hold.

    Args:
        table: ``(requests, width)``.
        lengths: ``(requests,)``.
        size: tokens of a page.
        count: number of pages.
        most: the most keys of a request.

    Raises:
        InputError: a request has too many keys, or a page that does not exist.
    """
    for request, keys in enumerate(lengths.tolist()):
        if not 0 <= keys <= most:
            raise InputError(explain(f"lengths[{request}]", keys, "must be a number of keys", f"0..{most}"))
        used = table[request, : -(-keys // size)].tolist()
        if wrong := [page for page in used if not 0 <= page < count]:
            raise InputError(explain(f"block_table[{request}]", wrong[0], "must be a page", f"0..{count - 1}"))


def check_threshold(given: int) -> None:
    """Check the most new queries of a request that kernels of decode steps compute.

    Raises:
        InputError: it is no number of new queries that one decode step can have.
    """
    threshold = as_int(given)
    if threshold is None or not 1 <= threshold <= MAX_NEW_TOKENS:
        rule = "kernels of decode compute a few new queries of a request only"
        raise InputError(explain("decode_threshold", given, rule, f"1..{MAX_NEW_TOKENS}"))


class Routes(NamedTuple):
    """The requests of a call, divided by the kernels that compute them.

    Both parts list all requests; a request of one part has length 0 in the other.

    Attributes:
        steps: requests with few new queries, for the kernels of decode steps; None if there can be none.
        chunks: the others, for the kernels of packed documents; None if there can be none.
    """

    steps: Pages | None
    chunks: Documents | None

    @classmethod
    def of(cls, pages: Pages, context: int, threshold: int, is_invariant: bool) -> Routes:
        """Divide the requests of a call on the device, without waiting for it.

        Args:
            pages: the requests.
            context: earlier queries that a new one depends on.
            threshold: the most new queries of a request in a decode step.
            is_invariant: whether steps have ``threshold`` new rows even if all requests have fewer, so
                that the kernel, and with it bits, do not depend on the longest request.
        """
        most, requests, boundaries = context + threshold, len(pages.lengths), pages.cu_seq_q
        if requests and context < pages.max_q <= most:
            if is_invariant:
                pages = pages._replace(cu_seq_q=pages.boundaries, max_q=most)
            return cls(pages, None)
        has_steps = requests > 0 and context < pages.max_q and boundaries is not None
        boundaries = pages.boundaries
        lengths, cu_seq_k = divide(boundaries, pages.lengths, most if has_steps else -1)
        chunks = Documents(boundaries, cu_seq_k, pages.max_q, pages.max_k)
        return cls(pages._replace(max_q=most, lengths=lengths) if has_steps else None, chunks)
