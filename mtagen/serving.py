"""Serving: keep the earlier queries of requests whose keys and values an engine keeps in pages.

A convolved score needs scores of earlier queries: cq - 1 for each convolution, an op's ``context``.
An engine such as vLLM has no place for them. So each page gets a *ring* of a few slots: the query
of the token at place o of a page goes to slot o mod slots. A full page then holds the last queries
of its tokens, whichever request filled it, so requests can share pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import document_of
from .errors import InputError, explain
from .ops.append import BEFORE_START, NOWHERE, REPLACED, Append, Places, append
from .ops.attention import AttentionOp
from .ops.checks import check_boundaries, may_read
from .ops.pages import check_no_gradients, check_table
from .spec import as_int

__all__ = ["Rings", "Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """The requests of one step of an engine, and where their queries lie in rings.

    Layers whose rings have the same ``context`` and slots share a step. It is made on the device
    without waiting for it, and its tensors have shapes that follow from ``total`` and the number of
    requests.

    Attributes:
        sizes: pages, slots, ``size`` and ``context`` of the rings for which it was made.
        lengths: ``(requests,)`` int32, tokens of each request, the new ones included.
        places: where the rows of the step lie.
    """

    sizes: tuple[int, ...]
    lengths: Tensor
    places: Places

    @property
    def cu_seq_q(self) -> Tensor:
        """``(requests + 1,)`` int32, where the rows of each request begin: earlier queries, then new ones.

        :meth:`mtagen.AttentionOp.paged` takes such rows.
        """
        return self.places.cu_seq_q

    @property
    def rows(self) -> Tensor:
        """``(total,)`` int32, the row of each new query."""
        return self.places.rows

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
        _check_requests(cu_seq_q, lengths)
        _check_counts(("total", total, 0))
        requests, context, size, slots = len(lengths), rings.context, rings.size, max(rings.slots, 1)
        past = lengths - cu_seq_q.diff()
        token = torch.arange(total, device=lengths.device, dtype=torch.int32)
        number = torch.arange(requests + 1, device=lengths.device, dtype=torch.int32)
        owner, begins = document_of(cu_seq_q, token), cu_seq_q + number * context
        tokens = queries = replaced = torch.full_like(token, NOWHERE)
        if requests:
            is_real = token < cu_seq_q[-1]
            position = torch.where(is_real, past[owner] + token - cu_seq_q[owner], 0)
            page, place = page_of(owner, position), position % size
            tokens = torch.where(is_real, page * size + place, NOWHERE)
            end = torch.minimum(lengths[owner], position - place + size)  # of the page's tokens, after the step
            stays = is_real & (end - position <= rings.slots)
            queries = torch.where(stays, page * slots + place % slots, NOWHERE)
            # The last token before the step that has the slot. If it lies in another page, it stays there.
            before = position - ((position - past[owner]) // slots + 1) * slots
            first = past[owner] - context  # of the earlier queries that the request needs
            is_needed = stays & (before >= torch.maximum(first, position - place))
            replaced = torch.where(is_needed, begins[owner] + before - first, NOWHERE)
        return cls(
            sizes=rings.sizes,
            lengths=lengths,
            places=Places(
                cu_seq_q=begins,
                rows=token + (owner + 1) * context,
                tokens=tokens.to(torch.int32),
                queries=queries.to(torch.int32),
                replaced=replaced,
                earlier=_places_of_earlier(rings, past, lengths, page_of),
            ),
        )

    @classmethod
    def of_tables(cls, rings: Rings, cu_seq_q: Tensor, lengths: Tensor, total: int, block_table: Tensor) -> Step:
        """Return the step of requests whose pages a table lists.

        Args:
            block_table: ``(requests, width)`` int32, as :meth:`mtagen.AttentionOp.paged` takes it.
            rings, cu_seq_q, lengths, total: as in :meth:`of`.

        Raises:
            InputError: as :meth:`of`; or the boundaries decrease or exceed ``total``, or a request has more
                new tokens than tokens, too many keys, or a page that the rings lack. A GPU's values are
                checked with ``MTAGEN_CHECK_VALUES=1``.
        """
        _check_requests(cu_seq_q, lengths)
        _check_counts(("total", total, 0))
        if may_read(lengths):
            check_boundaries(("cu_seq_q", cu_seq_q), ("total", total), total, lengths.device)
            if bool((cu_seq_q.diff() > lengths).any()):
                got, rule = (cu_seq_q.diff().tolist(), lengths.tolist()), "requests have more new tokens than tokens"
                raise InputError(explain("cu_seq_q.diff(), lengths", got, rule, "lengths that include the new tokens"))
            room = block_table.shape[1] * rings.size
            check_table(block_table, lengths, rings.size, len(rings.queries), room)
        table = block_table if block_table.shape[1] else F.pad(block_table, (0, 1))  # if no request has a token
        return cls.of(rings, cu_seq_q, lengths, total, lambda request, at: table[request, at // rings.size])


def _places_of_earlier(
    rings: Rings, past: Tensor, lengths: Tensor, page_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the places of the earlier queries of requests that had ``past`` tokens before the step."""
    context, size, slots = rings.context, rings.size, max(rings.slots, 1)
    position = past[:, None] - context + torch.arange(context, device=past.device, dtype=torch.int32)
    if not position.numel():
        return position
    request = torch.arange(len(past), device=past.device, dtype=torch.int32)[:, None].expand_as(position)
    found = position.clamp(min=0)
    place = page_of(request, found) * slots + found % size % slots
    open_page = (past - past % size)[:, None]  # the first token of the page that the request's new tokens go on filling
    end = torch.minimum(lengths[:, None], open_page + size)
    last = end - 1 - (end - 1 - position) % slots  # the last token that has the slot after the step
    is_replaced = (position >= open_page) & (last >= past[:, None])
    place = torch.where(is_replaced, REPLACED, place)
    return torch.where(position < 0, BEFORE_START, place).to(torch.int32)


@dataclass(eq=False)
class Rings:
    """The last queries of each page, for one layer.

    Attributes:
        queries: ``(pages, slots, H, D)``.
        size: tokens of a page.
        context: how many earlier queries a new one depends on.
    """

    queries: Tensor
    size: int
    context: int

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
        """Make empty rings.

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
        shape = pages, *cls.page_shape(op, heads, spare=spare)
        return cls(torch.zeros(shape, device=device, dtype=dtype), size, op.plan.spec.context)

    @classmethod
    def in_padding(cls, op: AttentionOp, heads: int, pages: Tensor, *, spare: int = 0) -> Rings:
        """Return rings that lie behind the keys and values of each page, in the memory of an engine.

        Args:
            op: as in :meth:`for_op`.
            heads: as in :meth:`for_op`.
            pages: ``(pages, size, ...)``, keys and values of queries' dtype. The elements of a page
                lie one after another in any order, and :meth:`page_shape` elements of padding
                follow them.
            spare: as in :meth:`for_op`.

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
        return cls(queries, pages.shape[1], op.plan.spec.context)

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
    def sizes(self) -> tuple[int, int, int, int]:
        """Pages, slots, tokens of a page, and context: what a step depends on."""
        return len(self.queries), self.slots, self.size, self.context

    @property
    def slots(self) -> int:
        """Queries that a page holds."""
        return self.queries.shape[1]

    def append(
        self,
        q: Tensor,
        step: Step,
        *,
        k: Tensor | None = None,
        v: Tensor | None = None,
        k_pages: Tensor | None = None,
        v_pages: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens of a step, and return their queries with the earlier ones that they depend on.

        Earlier queries that new ones overwrite are read first. The others are read afterwards,
        because another request of the same step may have filled a shared page.

        Triton's kernels do it on a GPU, and the first call compiles them; a CUDA graph can capture
        later ones. Without Triton, PyTorch's indexing does it and waits for the GPU.

        Args:
            q: ``(total, H, D)``, the new queries.
            step: the requests.
            k, v: ``(total, Hkv, D)`` and ``(total, Hkv, DV)``, the new keys and values, if they are to
                be stored as well.
            k_pages, v_pages: ``(pages, size, Hkv, D)`` and ``(pages, size, Hkv, DV)``, where they are
                stored, as :meth:`mtagen.AttentionOp.paged` takes them.

        Returns:
            ``(total + requests * context, H, D)``, what :meth:`mtagen.AttentionOp.paged` takes.

        Raises:
            InputError: the step was made for rings of other sizes, a tensor does not fit, or gradients
                are asked for.
        """
        stored = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
        given = {name: x for name, x in stored.items() if x is not None}
        self._check(q, step, given)
        if not (self.context or given):
            return q
        return append(Append(self.queries, k_pages, v_pages, q, k, v, step.places))

    def _check(self, q: Tensor, step: Step, stored: Mapping[str, Tensor]) -> None:
        """Check the arguments of :meth:`append`."""
        if step.sizes != self.sizes:
            rule = "the step was made for rings of other pages, slots, sizes or context"
            raise InputError(explain("step.sizes", step.sizes, rule, self.sizes))
        total, held = len(step.rows), self.queries
        _check_like("q", q, (total, *held.shape[2:]), held)
        check_no_gradients([q, *stored.values()])
        if not stored:
            return
        if len(stored) < 4:
            rule = "keys and values, and the pages that take them, belong together"
            raise InputError(explain("k, v, k_pages, v_pages", [*stored], rule, "all four, or none"))
        for name in ("k", "v"):
            pages = stored[f"{name}_pages"]
            if not (pages.ndim == 4 and pages.shape[1] == self.size and pages.stride(3) == 1):
                rule = f"must be pages of {self.size} tokens, whose last stride is 1"
                raise InputError(explain(f"{name}_pages.shape", tuple(pages.shape), rule, "(pages, size, Hkv, D)"))
            if len(pages) != len(held):
                rule = "must have as many pages as the rings"
                raise InputError(explain(f"{name}_pages.shape", tuple(pages.shape), rule, f"{len(held)} pages"))
            _check_like(name, stored[name], (total, *pages.shape[2:]), pages)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the rings of some pages to others, as an engine does when it copies their keys.

        Args:
            sources: ``(n,)`` integers, pages that are read.
            targets: ``(n,)`` integers, pages that are overwritten; none of them twice.
        """
        self.queries[targets] = self.queries[sources]


def _check_requests(cu_seq_q: Tensor, lengths: Tensor) -> None:
    """Check the shapes and dtypes of a step's boundaries and lengths."""
    for name, x, count in (("lengths", lengths, len(lengths)), ("cu_seq_q", cu_seq_q, len(lengths) + 1)):
        if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.shape != (count,):
            got = (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(explain(name, got, "must fit the requests", f"shape ({count},), torch.int32"))


def _check_like(name: str, x: Tensor, shape: tuple[int, ...], held: Tensor) -> None:
    """Check a tensor of new rows that ``held`` takes."""
    got, legal = (tuple(x.shape), x.dtype, x.device), (shape, held.dtype, held.device)
    if got != legal:
        raise InputError(explain(name, got, "must have a row for each token of the step, as it is stored", legal))


def _check_counts(*counts: tuple[str, int, int]) -> None:
    """Check numbers by their names and least values."""
    for name, given, least in counts:
        count = as_int(given)
        if count is None or count < least:
            legal = f"{least}, {least + 1}, ..."
            raise InputError(explain(name, given, f"must be an int, at least {least}", legal))
