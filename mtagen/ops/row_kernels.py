"""Triton kernels that move rows of requests between packed tensors, pages and rings.

They depend on no spec, so nothing is generated.
"""

import triton
import triton.language as tl


@triton.jit
def _columns(width, stride_h, D: tl.constexpr, BLOCK: tl.constexpr):
    """The offsets of a program's elements in a row (heads, D) of `width` elements, and whether the row has them."""
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return (x // D).to(tl.int64) * stride_h + x % D, x < width


@triton.jit
def _copy(to, to_h, source, source_h, width, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a program's elements of a row."""
    read, exists = _columns(width, source_h, D, BLOCK)
    written, _ = _columns(width, to_h, D, BLOCK)
    tl.store(to + written, tl.load(source + read, mask=exists), mask=exists)


@triton.jit
def _slot(pages, place, stride_page, stride, SIZE: tl.constexpr):
    """The row at a place of pages with SIZE rows each."""
    return pages + (place // SIZE).to(tl.int64) * stride_page + (place % SIZE).to(tl.int64) * stride


@triton.jit
def store_tokens(
    rows_ptr, q_ptr, rings_ptr, k_pages_ptr, k_ptr, v_pages_ptr, v_ptr,
    row_ptr, place_ptr, ring_place_ptr, replaced_row_ptr, q_width, k_width, v_width,
    q_n, q_h, k_page, k_page_n, k_page_h, k_n, k_h, v_page, v_page_n, v_page_h, v_n, v_h,
    DV: tl.constexpr, SIZE: tl.constexpr, ring_page, ring_n, ring_h, D: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a new token: its query among the step's rows and in a ring; its key and its value in a page if SIZE > 0.

    A query that it replaces in the ring goes to the step's rows if the request needs it.
    """
    token = tl.program_id(0).to(tl.int64)
    q = q_ptr + token * q_n
    _copy(rows_ptr + tl.load(row_ptr + token).to(tl.int64) * q_width, D, q, q_h, q_width, D, BLOCK)
    if SIZE:
        place = tl.load(place_ptr + token)
        if place >= 0:
            k, v = k_ptr + token * k_n, v_ptr + token * v_n
            _copy(_slot(k_pages_ptr, place, k_page, k_page_n, SIZE), k_page_h, k, k_h, k_width, D, BLOCK)
            _copy(_slot(v_pages_ptr, place, v_page, v_page_n, SIZE), v_page_h, v, v_h, v_width, DV, BLOCK)
    if SLOTS:
        place = tl.load(ring_place_ptr + token)
        if place >= 0:
            ring = _slot(rings_ptr, place, ring_page, ring_n, SLOTS)
            replaced_row = tl.load(replaced_row_ptr + token).to(tl.int64)
            if replaced_row >= 0:
                _copy(rows_ptr + replaced_row * q_width, D, ring, ring_h, q_width, D, BLOCK)
                tl.debug_barrier()  # all threads have read before one writes
            _copy(ring, ring_h, q, q_h, q_width, D, BLOCK)


@triton.jit
def _fill(to, value, width, D: tl.constexpr, BLOCK: tl.constexpr):
    """Fill a program's elements of a contiguous row."""
    x, exists = _columns(width, D, D, BLOCK)
    tl.store(to + x, tl.full([BLOCK], value, tl.float32).to(to.dtype.element_ty), mask=exists)


@triton.jit
def load_earlier(
    rows_ptr, rings_ptr, cu_seq_q_ptr, place_ptr, width, ring_page, ring_n, ring_h,
    D: tl.constexpr, SLOTS: tl.constexpr, CONTEXT: tl.constexpr, BEFORE_START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load an earlier query of a request from its ring; 0 before the request's start."""
    number = tl.program_id(0)
    place = tl.load(place_ptr + number)
    row = (tl.load(cu_seq_q_ptr + number // CONTEXT) + number % CONTEXT).to(tl.int64)
    rows = rows_ptr + row * width
    if place >= 0:
        _copy(rows, D, _slot(rings_ptr, place, ring_page, ring_n, SLOTS), ring_h, width, D, BLOCK)
    if place == BEFORE_START:
        _fill(rows, 0.0, width, D, BLOCK)


@triton.jit(do_not_specialize=["n_requests", "most"])
def divide_requests(steps_ptr, cu_seq_k_ptr, cu_seq_q_ptr, lengths_ptr, n_requests, most, BLOCK: tl.constexpr):
    """Write the lengths of requests with at most `most` rows, 0 for others, and where the keys of the others begin."""
    total = 0
    tl.store(cu_seq_k_ptr, total)
    for first in range(0, n_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        exists = request < n_requests
        begin = tl.load(cu_seq_q_ptr + request, mask=exists, other=0)
        rows = tl.load(cu_seq_q_ptr + request + 1, mask=exists, other=0) - begin
        length = tl.load(lengths_ptr + request, mask=exists, other=0)
        tl.store(steps_ptr + request, tl.where(rows <= most, length, 0), mask=exists)
        others = tl.where(rows <= most, 0, length)
        tl.store(cu_seq_k_ptr + request + 1, total + tl.cumsum(others, 0), mask=exists)
        total += tl.sum(others, 0)


@triton.jit(do_not_specialize=["rows"])
def load_last_rows(last_ptr, q_ptr, cu_seq_q_ptr, rows, width, q_n, q_h, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load one of the last `rows` rows of a request; 0 if it does not exist."""
    number = tl.program_id(0)
    request = number // rows
    row = tl.load(cu_seq_q_ptr + request + 1) - rows + number % rows
    last = last_ptr + number.to(tl.int64) * width
    if row >= tl.load(cu_seq_q_ptr + request):
        _copy(last, D, q_ptr + row.to(tl.int64) * q_n, q_h, width, D, BLOCK)
    else:
        _fill(last, 0.0, width, D, BLOCK)


@triton.jit(do_not_specialize=["n_requests", "n_halvings", "n_queries", "n_rows", "new"])
def merge_results(
    out_ptr, lse_ptr, chunks_ptr, chunks_lse_ptr, steps_ptr, steps_lse_ptr, cu_seq_q_ptr,
    n_requests, n_halvings, n_queries, n_rows, heads, new,
    D: tl.constexpr, CONTEXT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out and lse of a new query from the results of chunks, or of steps with at most `new` new queries."""
    query = tl.program_id(0)
    request, end = query * 0, query * 0 + n_requests  # the first request whose new queries end behind the query
    for _ in range(n_halvings):
        middle = (request + end) // 2
        is_open = middle < end
        behind = tl.load(cu_seq_q_ptr + middle + 1, mask=is_open, other=0) - (middle + 1) * CONTEXT
        is_before = is_open & (behind <= query)
        request, end = tl.where(is_before, middle + 1, request), tl.where(is_before, end, middle)
    exists = request < n_requests
    first = tl.load(cu_seq_q_ptr + request, mask=exists, other=0) - request * CONTEXT
    behind = tl.load(cu_seq_q_ptr + request + 1, mask=exists, other=0) - (request + 1) * CONTEXT

    out, width = out_ptr + query.to(tl.int64) * heads * D, heads * D
    h = tl.arange(0, HEADS)
    lse = lse_ptr + h.to(tl.int64) * n_queries + query
    is_head = h < heads
    if exists & (behind - first <= new):
        number = request.to(tl.int64) * heads * new + new - behind + query
        _copy(out, D, steps_ptr + number * D, new * D, width, D, BLOCK)
        tl.store(lse, tl.load(steps_lse_ptr + number + h * new, mask=is_head), mask=is_head)
    elif exists:
        row = (query + (request + 1) * CONTEXT).to(tl.int64)
        _copy(out, D, chunks_ptr + row * width, D, width, D, BLOCK)
        tl.store(lse, tl.load(chunks_lse_ptr + h.to(tl.int64) * n_rows + row, mask=is_head), mask=is_head)
    else:
        _fill(out, 0.0, width, D, BLOCK)
        tl.store(lse, tl.full([HEADS], float("-inf"), tl.float32), mask=is_head)
