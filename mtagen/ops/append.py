"""The registered op ``mtagen::append``: store the new tokens of a step, and return their queries with earlier ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.triton_package import serves
from .executor import on_device_of
from .library import define_op, run

NOWHERE = -1  # a place of what is not stored
BEFORE_START, REPLACED = -1, -2  # in the places of earlier queries
_BLOCK = 1024  # elements that a program copies


class Places(NamedTuple):
    """Where the rows of a step lie, all int32 and contiguous.

    A place is ``page * size + row`` in pages, and ``page * slots + slot`` in rings.

    Attributes:
        cu_seq_q: ``(requests + 1,)``, where the rows of each request begin: earlier queries, then new ones.
        rows: ``(total,)``, the row of each new query.
        tokens: ``(total,)``, the place of each new token in pages, or ``NOWHERE``.
        queries: ``(total,)``, the place of each new query in rings, or ``NOWHERE`` if a later token of
            the step takes the slot.
        replaced: ``(total,)``, the row of the earlier query that the new one overwrites in its ring;
            ``NOWHERE`` if the request does not need what is overwritten.
        earlier: ``(requests, context)``, the place of each earlier query in rings; ``BEFORE_START`` if
            the request has none, ``REPLACED`` if ``replaced`` has its row.
    """

    cu_seq_q: Tensor
    rows: Tensor
    tokens: Tensor
    queries: Tensor
    replaced: Tensor
    earlier: Tensor

    @property
    def of_tokens(self) -> tuple[Tensor, ...]:
        """The tensors with an entry for each new token."""
        return self.rows, self.tokens, self.queries, self.replaced

    @property
    def earlier_rows(self) -> Tensor:
        """``(requests, context)`` int32, the row of each earlier query."""
        row = torch.arange(self.earlier.shape[1], device=self.earlier.device, dtype=torch.int32)
        return self.cu_seq_q[:-1, None] + row


class Append(NamedTuple):
    """The arguments of ``mtagen::append``.

    Attributes:
        rings: ``(pages, slots, H, D)``.
        k_pages: ``(pages, size, Hkv, D)``.
        v_pages: ``(pages, size, Hkv, DV)``.
        q: ``(total, H, D)``, the new queries.
        k: ``(total, Hkv, D)``.
        v: ``(total, Hkv, DV)``. Keys, values and their pages are None if they are stored otherwise.
        places: where the rows of the step lie.
    """

    rings: Tensor
    k_pages: Tensor | None
    v_pages: Tensor | None
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    places: Places

    def empty_rows(self) -> Tensor:
        """Return room for the rows of the step."""
        return self.q.new_empty(len(self.q) + self.places.earlier.numel(), *self.q.shape[1:])


def append(arguments: Append) -> Tensor:
    """Store the new tokens of a step, and return ``(total + requests * context, H, D)``, the rows of all requests.

    Earlier queries that new ones overwrite are read first. The others are read after all new ones are
    stored, because another request of the same step may have filled a shared page.
    """
    *tensors, places = arguments
    rows: Tensor = run("append", *tensors, *places)
    return rows


def _arguments(*tensors: Tensor) -> Append:
    first = len(tensors) - len(Places._fields)
    return Append._make((*tensors[:first], Places._make(tensors[first:])))


def _kernel(*tensors: Tensor) -> Tensor:
    arguments = _arguments(*tensors)
    return _by_triton(arguments) if serves(arguments.q) else _by_torch(arguments)


def _by_torch(x: Append) -> Tensor:
    """Append by torch's indexing, which waits for a GPU."""
    rows, slots, places = x.empty_rows(), x.rings.shape[1], x.places
    rows[places.rows] = x.q
    for pages, tokens in ((x.k_pages, x.k), (x.v_pages, x.v)):
        if pages is not None and tokens is not None:
            stored = places.tokens != NOWHERE
            pages[_pages_and_rows(places.tokens[stored], pages.shape[1])] = tokens[stored]
    if not slots:
        return rows
    needed = places.replaced != NOWHERE
    rows[places.replaced[needed]] = x.rings[_pages_and_rows(places.queries[needed], slots)]
    stored = places.queries != NOWHERE
    x.rings[_pages_and_rows(places.queries[stored], slots)] = x.q[stored]
    rows[places.earlier_rows[places.earlier == BEFORE_START]] = 0
    kept = places.earlier >= 0
    rows[places.earlier_rows[kept]] = x.rings[_pages_and_rows(places.earlier[kept], slots)]
    return rows


def _pages_and_rows(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return place // size, place % size


def _by_triton(x: Append) -> Tensor:
    """Append by two kernels."""
    import triton

    from .row_kernels import load_earlier, store_tokens

    rings, k_pages, v_pages, q, k, v, places = x
    rows, (total, _, dim), slots, context = x.empty_rows(), q.shape, rings.shape[1], places.earlier.shape[1]
    q, size = _with_dense_rows(q), 0
    stored = q[None], q, q[None], q  # not read
    if k_pages is not None and v_pages is not None and k is not None and v is not None:
        stored, size = (k_pages, _with_dense_rows(k), v_pages, _with_dense_rows(v)), k_pages.shape[1]
    widths = [math.prod(tokens.shape[1:]) for tokens in (q, stored[1], stored[3])]
    of_ring = *rings.stride()[:3], dim, slots
    with on_device_of(q):
        if total:
            strides = [stride for tensor in (q, *stored) for stride in tensor.stride()[:-1]]
            pointers = (rings, *stored, *places.of_tokens)
            grid = total, triton.cdiv(max(widths), _BLOCK)
            store_tokens[grid](rows, q, *pointers, *widths, *strides, stored[3].shape[2], size, *of_ring, _BLOCK)
        if places.earlier.numel():
            grid = places.earlier.numel(), triton.cdiv(widths[0], _BLOCK)
            pointers = rings, places.cu_seq_q, places.earlier
            load_earlier[grid](rows, *pointers, widths[0], *of_ring, context, BEFORE_START, _BLOCK)
    return rows


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


define_op(
    "append",
    [
        "Tensor(a!) rings",
        "Tensor(b!)? k_pages",
        "Tensor(c!)? v_pages",
        "Tensor q",
        "Tensor? k",
        "Tensor? v",
        *(f"Tensor {name}" for name in Places._fields),
    ],
    "Tensor",
    _kernel,
    lambda *tensors: _arguments(*tensors).empty_rows(),
)
