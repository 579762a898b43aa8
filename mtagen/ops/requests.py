"""Registered ops that divide the requests of a call on pages among kernels, and merge the results.

Triton's kernels compute them where Triton runs, and PyTorch's ops elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Length, document_of, schema_of
from ..runtime.triton_package import serves
from .executor import on_device_of
from .library import define_op, run

_BLOCK = 1024  # elements that a program copies


def divide(cu_seq_q: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Divide requests by their number of rows.

    Args:
        cu_seq_q: ``(requests + 1,)`` int32, where the rows of each request begin.
        lengths: ``(requests,)`` int32, keys of each request.
        most: the most rows of a step; -1 if there are no steps.

    Returns:
        ``(requests,)`` int32, the lengths of steps, 0 for the other requests; ``(requests + 1,)`` int32,
        where the keys of the other requests begin if steps have none.
    """
    divided: tuple[Tensor, Tensor] = run("divide", cu_seq_q, lengths, most)
    return divided


def last_rows(q: Tensor, cu_seq_q: Tensor, rows: int) -> Tensor:
    """Return the last ``rows`` rows of each request, ``(requests, rows, H, D)``; 0 where it has fewer.

    Args:
        q: ``(total, H, D)``.
        cu_seq_q: as in :func:`divide`.
        rows: their number.
    """
    last: Tensor = run("last_rows", q, cu_seq_q, rows)
    return last


class Results(NamedTuple):
    """The results of kernels, as ``mtagen::merge`` takes them.

    Attributes:
        chunks: out ``(total rows, H, DV)`` of all rows by the kernels of packed documents, or None.
        chunks_lse: ``(H, total rows)``, or None.
        steps: out ``(requests, H, new, DV)`` of the last queries of each request by the kernels of decode,
            valid for requests with at most ``new`` new queries; or None.
        steps_lse: ``(requests, H, new)``, or None.
        cu_seq_q: ``(requests + 1,)`` int32, where the rows of each request begin.
        total: number of new queries, padding included.
        context: how many rows come before a request's new queries.
    """

    chunks: Tensor | None
    chunks_lse: Tensor | None
    steps: Tensor | None
    steps_lse: Tensor | None
    cu_seq_q: Tensor
    total: Length
    context: int

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return room for out ``(total, H, DV)`` and lse ``(H, total)``."""
        out, lse = (self.chunks, self.chunks_lse) if self.steps is None else (self.steps, self.steps_lse)
        assert out is not None, "some kernel computes the call"
        assert lse is not None, "some kernel computes the call"
        heads = out.shape[1]
        return out.new_empty(self.total, heads, out.shape[-1]), lse.new_empty(heads, self.total)


def merge(results: Results) -> tuple[Tensor, Tensor]:
    """Return out ``(total, H, DV)`` and lse ``(H, total)`` of all new queries; 0 and -inf for padding."""
    merged: tuple[Tensor, Tensor] = run("merge", *results)
    return merged


def _divide(cu_seq_q: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    if not serves(lengths):
        is_step = cu_seq_q.diff() <= most
        ends = torch.where(is_step, 0, lengths).cumsum(0, dtype=torch.int32)
        return torch.where(is_step, lengths, 0), torch.cat([ends.new_zeros(1), ends])
    from .row_kernels import divide_requests

    steps, cu_seq_k = _empty_division(cu_seq_q, lengths, most)
    with on_device_of(lengths):
        divide_requests[1,](steps, cu_seq_k, cu_seq_q.contiguous(), lengths.contiguous(), len(lengths), most, _BLOCK)
    return steps, cu_seq_k


def _empty_division(cu_seq_q: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    return lengths.new_empty(len(lengths)), cu_seq_q.new_empty(len(cu_seq_q))


def _last_rows(q: Tensor, cu_seq_q: Tensor, rows: int) -> Tensor:
    if not serves(q):
        if not len(q):
            return _empty_last_rows(q, cu_seq_q, rows).zero_()
        row = cu_seq_q[1:, None] + torch.arange(-rows, 0, device=q.device, dtype=torch.int32)
        exists = row >= cu_seq_q[:-1, None]
        return torch.where(exists[..., None, None], q[row.clamp(min=0)], 0)
    import triton

    from .row_kernels import load_last_rows

    last, width = _empty_last_rows(q, cu_seq_q, rows), q.shape[1] * q.shape[2]
    grid = len(last) * rows, triton.cdiv(width, _BLOCK)
    with on_device_of(q):
        load_last_rows[grid](last, q, cu_seq_q.contiguous(), rows, width, *q.stride()[:2], q.shape[2], _BLOCK)
    return last


def _empty_last_rows(q: Tensor, cu_seq_q: Tensor, rows: int) -> Tensor:
    return q.new_empty(len(cu_seq_q) - 1, rows, *q.shape[1:])


def _merge(*arguments: Any) -> tuple[Tensor, Tensor]:
    results = Results(*arguments)
    return _merge_by_triton(results) if serves(results.cu_seq_q) else _merge_by_torch(results)


def _merge_by_torch(results: Results) -> tuple[Tensor, Tensor]:
    chunks, chunks_lse, steps, steps_lse, cu_seq_q, total, context = results
    begins = cu_seq_q - torch.arange(len(cu_seq_q), device=cu_seq_q.device, dtype=torch.int32) * context
    query = torch.arange(total, device=cu_seq_q.device, dtype=torch.int32)
    request = document_of(begins, query)
    if chunks is None or chunks_lse is None:
        out, lse = results.empty()
        out, lse = out.zero_(), lse.fill_(-torch.inf)
    else:
        row = query + (request + 1) * context
        out, lse = chunks[row], chunks_lse[:, row]
    if steps is None or steps_lse is None:
        return out, lse
    new, end = steps.shape[2], begins[1:][request]
    is_step = (query < end) & (end - begins[:-1][request] <= new)
    number = (new - end + query).clamp(0, new - 1)
    out = torch.where(is_step[:, None, None], steps[request, :, number], out)
    return out, torch.where(is_step[:, None], steps_lse[request, :, number], lse.T).T.contiguous()


def _merge_by_triton(results: Results) -> tuple[Tensor, Tensor]:
    import triton

    from .row_kernels import merge_results

    chunks, chunks_lse, steps, steps_lse, cu_seq_q, total, context = results
    out, lse = results.empty()
    (_, heads, dim), requests = out.shape, len(cu_seq_q) - 1
    new, n_rows = -1 if steps is None else steps.shape[2], 0 if chunks is None else len(chunks)
    given = (chunks, out), (chunks_lse, lse), (steps, out), (steps_lse, lse)
    pointers = [unread if x is None else x.contiguous() for x, unread in given]
    sizes = requests, requests.bit_length(), total, n_rows, heads, new
    constants = dim, context, triton.next_power_of_2(heads), _BLOCK
    if total:
        with on_device_of(cu_seq_q):
            grid = total, triton.cdiv(heads * dim, _BLOCK)
            merge_results[grid](out, lse, *pointers, cu_seq_q.contiguous(), *sizes, *constants)
    return out, lse


define_op("divide", ("Tensor cu_seq_q", "Tensor lengths", "int most"), "(Tensor, Tensor)", _divide, _empty_division)
define_op("last_rows", ("Tensor q", "Tensor cu_seq_q", "SymInt rows"), "Tensor", _last_rows, _empty_last_rows)
define_op("merge", schema_of(Results), "(Tensor, Tensor)", _merge, lambda *arguments: Results(*arguments).empty())
