"""Functions of kernels for packed documents: each document is a sequence, and a schedule lists tiles of documents."""

import triton
import triton.language as tl

_TILE: tl.constexpr = tl.constexpr(128)  # rows or keys of a tile of the schedule


@triton.jit
def _blocks(n_tiles, BLOCK: tl.constexpr):
    """The number of blocks in the tiles of a schedule; some blocks belong to no document."""
    return n_tiles * (_TILE // BLOCK)


@triton.jit
def _longest_first(index, n_blocks):
    """The number of the block that a program takes: the schedule lists blocks that take longer first."""
    return index


@triton.jit
def _block(tiles_ptr, cu_seq_q_ptr, cu_seq_k_ptr, index, BLOCK: tl.constexpr):
    """The document of a program, and its block of rows or keys there.

    Returns the number of the document, -1 if there is none; the first row or key of the block; the first query of the
    document in the packed tensors, and the number of its queries; and the same for its keys.
    """
    PARTS: tl.constexpr = _TILE // BLOCK  # blocks of a tile of the schedule
    document = tl.load(tiles_ptr + index // PARTS * 2)
    begin = tl.load(tiles_ptr + index // PARTS * 2 + 1) * _TILE + index % PARTS * BLOCK
    exists = document >= 0
    first_q = tl.load(cu_seq_q_ptr + document, mask=exists, other=0)
    n_q = tl.load(cu_seq_q_ptr + document + 1, mask=exists, other=0) - first_q
    first_k = tl.load(cu_seq_k_ptr + document, mask=exists, other=0)
    n_k = tl.load(cu_seq_k_ptr + document + 1, mask=exists, other=0) - first_k
    return document, begin, first_q, n_q, first_k, n_k


@triton.jit
def _is_past(document, begin, count):
    """Whether there is no document, or a block that begins at `begin` is past its `count` rows or keys."""
    return (document < 0) | (begin >= count)


@triton.jit
def _first_place(document, first_q, CARRIED: tl.constexpr):
    """Where the rows of a document begin in the chunks: each document begins with a new tile.

    The tiles of a document have room for CARRIED rows more than exist.
    """
    return ((first_q + document * CARRIED) // _TILE + document) * _TILE


@triton.jit
def _chunk(strip_begin, strip_end, document, first_q, n_q, CARRIED: tl.constexpr):
    """The part of a chunk of rows that lies in the document.

    Returns the first row of the chunk, then begin and end of its rows in the document, and whether nothing is to do.
    """
    place = _first_place(document, first_q, CARRIED)
    begin, end = strip_begin - place, strip_end - place
    is_outside = (end <= 0) | (begin >= tl.maximum(n_q, 1))  # a document's first chunk has work even if it is empty
    return begin, tl.maximum(begin, 0), tl.minimum(end, n_q), is_outside


@triton.jit
def _chunk_block(
    begin, strip_begin, row_begin, row_end, document, first_q, n_q, CARRIED: tl.constexpr, LAG: tl.constexpr
):
    """The block of rows `begin` of the document, if it is in the chunk [row_begin, row_end).

    Returns the first row of the chunk, first row of the block, which lags by LAG rows, end of the rows, and whether
    nothing is to do.
    """
    place = _first_place(document, first_q, CARRIED)
    is_outside = (begin < row_begin - place) | (begin >= row_end - place)
    return strip_begin - place, begin - LAG, n_q, is_outside


@triton.jit
def _are_rows(rows, end):
    """Whether rows of a block, which may lag, are rows of the document and before `end`."""
    return (rows >= 0) & (rows < end)


@triton.jit
def _address(b, first, head, stride_b, stride_h, stride_n):
    """The element of a tensor (N, H, D) with these strides where a head's vectors of the document begin."""
    return first * stride_n + head * stride_h


@triton.jit
def _vector(head, n_heads, vector, first, total):
    """The number of a vector of the document in a contiguous tensor (N, H, D)."""
    return first * n_heads + head + vector * n_heads


@triton.jit
def _with_partner(count, partners):
    """The number of the `count` rows or keys that have one of `partners` keys or rows.

    Vectors of a document that has no partners may have any value.
    """
    return tl.where(partners > 0, count, 0)
