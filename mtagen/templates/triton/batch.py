"""Functions of kernels for a batch: each batch entry is one sequence."""

import triton
import triton.language as tl


@triton.jit
def _blocks(length, BLOCK: tl.constexpr):
    """The number of blocks of an axis of this length."""
    return tl.cdiv(length, BLOCK)


@triton.jit
def _longest_first(index, n_blocks):
    """The number of the block that a program takes, if later blocks take longer: they start first."""
    return n_blocks - 1 - index


@triton.jit
def _block(n_q, n_k, index, BLOCK: tl.constexpr):
    """The sequence of a program, and its block of rows or keys there.

    Returns the number of the sequence within its batch entry; the first row or key of the block; the first query of
    the sequence within its batch entry, and the number of its queries; and the same for its keys.
    """
    return 0, index * BLOCK, 0, n_q, 0, n_k


@triton.jit
def _is_past(sequence, begin, count):
    """Whether a block that begins at `begin` is past the `count` rows or keys of the sequence. A batch has none."""
    return False


@triton.jit
def _chunk(strip_begin, strip_end, sequence, first_q, n_q, CARRIED: tl.constexpr):
    """The part of a chunk of rows that lies in the sequence.

    Returns the first row of the chunk, then begin and end of its rows in the sequence, and whether nothing is to do.
    """
    return strip_begin, strip_begin, strip_end, False


@triton.jit
def _chunk_block(
    begin, strip_begin, row_begin, row_end, sequence, first_q, n_q, CARRIED: tl.constexpr, LAG: tl.constexpr
):
    """The block `begin` of the rows that a launch computes for a chunk, [row_begin, row_end).

    Returns the first row of the chunk, first row of the block, end of the rows, and whether nothing is to do.
    """
    return strip_begin, row_begin + begin, row_end, False


@triton.jit
def _are_rows(rows, end):
    """Whether rows of a block are rows of the sequence and before `end`."""
    return rows < end


@triton.jit
def _address(b, first, head, stride_b, stride_h, stride_n):
    """The element of a tensor (B, H, N, D) with these strides where a head's vectors of the sequence begin."""
    return b * stride_b + head * stride_h


@triton.jit
def _vector(head, n_heads, vector, first, total):
    """The number of a vector of the sequence in a contiguous tensor (B, H, N, D); `head` is numbered through B."""
    return head * total + vector


@triton.jit
def _with_partner(count, partners):
    """The number of the `count` rows or keys that have one of `partners` keys or rows."""
    return count
