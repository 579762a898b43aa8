"""Serving: keep the earlier queries of requests whose keys and values an engine keeps in pages.

A convolved score needs scores of earlier queries: cq - 1 for each convolution, an op's ``context``.
An engine such as vLLM has no place for them. So each page gets a *ring* of a few slots: the query
of the token at place o of a page goes to slot o mod slots. A full page then holds the last queries
of its tokens, whichever request filled it, so requests can share pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import document_of
from .errors import InputError, explain
from .ops.attention import AttentionOp
from .spec import as_int

__all__ = ["Rings", "Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """The requests of one step of an engine, and where their queries lie in rings.

    Layers whose rings have the same ``context`` and slots share a step. It is made on the device
    without waiting for it, and its tensors have shapes that follow from ``total`` and the number of
    requests.

    Attributes:
        sizes: pages, slots, ``size``, ``context`` and ``unread`` of the rings for which it was made.
        cu_seq_q: ``(requests + 1,)`` int32, where the rows of each request begin among those that
            :meth:`mtagen.AttentionOp.paged` takes: earlier queries, then new ones.
        lengths: ``(requests,)`` int32, tokens of each request, the new ones included.
        rows: ``(total,)``, the row of each new query.
        earlier: ``(requests, context)``, the rows of the earlier queries.
        exists: ``(requests, context)``, whether the earlier query exists; False before the
            request's first token.
        is_open: ``(requests, context)``, whether the earlier query lies in the page that the
            request's new tokens go on filling.
        page, slot: ``(requests, context)``, where the earlier queries lie.
        new_page, new_slot: ``(total,)``, where the new queries go. Queries that later tokens of the
            step would overwrite go to the rings' ``unread`` page.
    """

    sizes: tuple[int, ...]
    cu_seq_q: Tensor
    lengths: Tensor
    rows: Tensor
    earlier: Tensor
    exists: Tensor
    is_open: Tensor
    page: Tensor
    slot: Tensor
    new_page: Tensor
    new_slot: Tensor

    @classmethod
    def of(
        cls,
        rings: Rings,
        cu_seq_q: Tensor,
        lengths: Tensor,
        total: int,
        page_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Step:
        """Return the step of some requests.

        Args:
            rings: the rings of one of the layers that share the step.
            cu_seq_q: ``(requests + 1,)`` int32, where the new tokens of each request begin, and
                where the last request ends. Tokens after that end are padding.
            lengths: ``(requests,)`` int32, tokens of each request, the new ones included.
            total: new tokens of all requests, padding included.
            page_of: the pages of some tokens, as a function of the numbers of their requests and
                of their positions, two tensors of one shape. Positions exist in the request, or are 0.

        Raises:
            InputError: ``cu_seq_q`` or ``lengths`` is no vector of int32, or they do not belong together.
        """
        for name, x, count in (("lengths", lengths, len(lengths)), ("cu_seq_q", cu_seq_q, len(lengths) + 1)):
            if x.dtype != torch.int32 or x.shape != (count,):
                got = tuple(x.shape), x.dtype
                raise InputError(explain(name, got, "must fit the requests", f"shape ({count},), torch.int32"))
        requests, context, size = len(lengths), rings.context, rings.size
        unread, device = rings.unread % len(rings.queries), lengths.device
        past = lengths - cu_seq_q.diff()
        token = torch.arange(total, device=device, dtype=torch.int32)
        owner, is_real = document_of(cu_seq_q, token), token < cu_seq_q[-1]
        new_page, new_slot = torch.full_like(token, unread), torch.zeros_like(token)
        if requests:
            position = torch.where(is_real, past[owner] + token - cu_seq_q[owner], 0)
            end = torch.minimum(lengths[owner], (position // size + 1) * size)  # of the page's tokens, after the step
            stays = is_real & (end - position <= rings.slots)
            new_page = torch.where(stays, page_of(owner, position), unread)
            new_slot = position % size % max(rings.slots, 1)
        number = torch.arange(requests, device=device, dtype=torch.int32)[:, None]
        back = torch.arange(context, device=device, dtype=torch.int32)
        before = past[:, None] - context + back
        place, exists = before.clamp(min=0), before >= 0
        return cls(
            sizes=rings.sizes,
            cu_seq_q=cu_seq_q + torch.arange(requests + 1, device=device, dtype=torch.int32) * context,
            lengths=lengths,
            rows=token + (owner + 1) * context,
            earlier=cu_seq_q[:-1, None] + number * context + back,
            exists=exists,
            is_open=before // size == past[:, None] // size,
            page=torch.where(exists, page_of(number.expand_as(place), place), unread) if place.numel() else place,
            slot=place % size % max(rings.slots, 1),
            new_page=new_page,
            new_slot=new_slot,
        )

    @classmethod
    def of_tables(cls, rings: Rings, cu_seq_q: Tensor, lengths: Tensor, total: int, block_table: Tensor) -> Step:
        """Return the step of requests whose pages a table lists.

        Args:
            block_table: ``(requests, width)`` int32, as :meth:`mtagen.AttentionOp.paged` takes it.
            rings, cu_seq_q, lengths, total: as in :meth:`of`.
        """
        table = block_table if block_table.shape[1] else F.pad(block_table, (0, 1))  # if no request has a token
        return cls.of(rings, cu_seq_q, lengths, total, lambda request, at: table[request, at // rings.size])


@dataclass(eq=False)
class Rings:
    """The last queries of each page, for one layer.

    Attributes:
        queries: ``(pages, slots, H, D)``.
        size: tokens of a page.
        context: how many earlier queries a new one depends on.
        unread: a page that no request has. It takes what nobody reads.
    """

    queries: Tensor
    size: int
    context: int
    unread: int = -1

    @classmethod
    def for_op(
        cls,
        op: AttentionOp,
        heads: int,
        pages: int,
        size: int,
        *,
        spare: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Rings:
        """Make empty rings; the unread page is one more than there are pages.

        Args:
            op: the layer's op.
            heads: H, heads of queries.
            pages: number of pages.
            size: tokens of a page.
            spare: how far a request may become shorter than it ever was, as speculative decoding
                takes tokens back. An engine that computes the last token of a shared page again
                needs 1 or more.
            device, dtype: of the queries; default PyTorch's.

        Raises:
            InputError: a number is not positive, or ``spare`` is negative.
        """
        _check_counts(("pages", pages, 1), ("size", size, 1))
        shape = pages + 1, *cls.page_shape(op, heads, spare=spare)
        return cls(torch.zeros(shape, device=device, dtype=dtype), size, op.plan.spec.context)

    @classmethod
    def in_padding(cls, op: AttentionOp, heads: int, pages: Tensor, *, spare: int = 0, unread: int) -> Rings:
        """Return rings that lie behind the keys and values of each page, in the memory of an engine.

        Args:
            op: as in :meth:`for_op`.
            heads: as in :meth:`for_op`.
            pages: ``(pages, size, ...)``, keys and values of queries' dtype. The elements of a page
                lie one after another in any order, and :meth:`page_shape` elements of padding
                follow them.
            spare: as in :meth:`for_op`.
            unread: a page that no request has.

        Raises:
            InputError: a page has gaps or too little padding, a number is not positive, or ``spare``
                is negative.
        """
        slots, _, head_dim = shape = cls.page_shape(op, heads, spare=spare)
        held = pages[0].numel()
        if held != 1 + sum((n - 1) * stride for n, stride in zip(pages.shape[1:], pages.stride()[1:], strict=True)):
            rule = "the keys and values of a page must lie one after another"
            raise InputError(explain("pages.stride()", pages.stride(), rule, "padding behind pages only"))
        room, needed = pages.stride(0) - held, math.prod(shape)
        if room < needed:
            rule = f"{slots} queries of {heads} heads with {head_dim} elements must fit"
            raise InputError(explain("elements of padding", room, rule, f"{needed} or more"))
        strides = pages.stride(0), heads * head_dim, head_dim, 1
        queries = pages.as_strided((len(pages), *shape), strides, pages.storage_offset() + held)
        return cls(queries, pages.shape[1], op.plan.spec.context, unread)

    @staticmethod
    def page_shape(op: AttentionOp, heads: int, *, spare: int = 0) -> tuple[int, int, int]:
        """Return the shape ``(slots, H, D)`` of the ring of a page, from which an engine plans its memory.

        Args:
            op: as in :meth:`for_op`.
            heads: as in :meth:`for_op`.
            spare: as in :meth:`for_op`.

        Raises:
            InputError: ``heads`` is not positive, or ``spare`` is negative.
        """
        _check_counts(("heads", heads, 1), ("spare", spare, 0))
        spec = op.plan.spec
        return spec.context + spare if spec.context else 0, heads, spec.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Pages, slots, tokens of a page, context, and the unread page: what a step depends on."""
        return len(self.queries), self.slots, self.size, self.context, self.unread

    @property
    def slots(self) -> int:
        """Queries that a page holds."""
        return self.queries.shape[1]

    def append(self, q: Tensor, step: Step) -> Tensor:
        """Store the new queries of a step, and return them with the earlier ones that they depend on.

        Earlier queries in a page that the request goes on filling are read first, because storing
        the new ones overwrites them. Queries in full pages are read afterwards, because another
        request of the same step may have filled a shared page.

        Args:
            q: ``(total, H, D)``, the new queries.
            step: the requests.

        Returns:
            ``(total + requests * context, H, D)``, what :meth:`mtagen.AttentionOp.paged` takes.

        Raises:
            InputError: the step was made for rings of other sizes.
        """
        if step.sizes != self.sizes:
            rule = "the step was made for rings of other pages, slots, sizes or context"
            raise InputError(explain("step.sizes", step.sizes, rule, self.sizes))
        if not self.context:
            return q
        open_pages = self.queries[step.page, step.slot]
        self.queries[step.new_page, step.new_slot] = q
        earlier = torch.where(step.is_open[..., None, None], open_pages, self.queries[step.page, step.slot])
        earlier = earlier.masked_fill(~step.exists[..., None, None], 0)
        rows = q.new_empty(len(q) + step.earlier.numel(), *q.shape[1:])
        rows[step.rows] = q
        rows[step.earlier.flatten()] = earlier.flatten(0, 1)
        return rows

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the rings of some pages to others, as an engine does when it copies their keys.

        Args:
            sources: ``(n,)`` integers, pages that are read.
            targets: ``(n,)`` integers, pages that are overwritten; none of them twice.
        """
        self.queries[targets] = self.queries[sources]


def _check_counts(*counts: tuple[str, int, int]) -> None:
    """Check numbers by their names and least values."""
    for name, given, least in counts:
        count = as_int(given)
        if count is None or count < least:
            legal = f"{least}, {least + 1}, ..."
            raise InputError(explain(name, given, f"must be an int, at least {least}", legal))
