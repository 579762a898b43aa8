import triton
import triton.language as tl


@triton.jit
def _page_rows(table_ptr, j, end, stride_page, stride, SIZE: tl.constexpr):
    """The elements from page 0 to the rows j of a sequence, in pages of SIZE rows that a table lists.

    Rows outside [0, end) are in no page.
    """
    page = tl.load(table_ptr + j // SIZE, mask=(j >= 0) & (j < end), other=0)
    return page.to(tl.int64) * stride_page + j % SIZE * stride


@triton.jit
def _load_pages(x_ptr, begin, table_ptr, j, end, stride_page, stride, width, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows j of a sequence, (rows, COLUMNS), in pages that begin `begin` elements after x_ptr.

    Rows outside [0, end) and columns from `width` on are 0.
    """
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # rows begin at multiples of 16 bytes
    strides = stride_page // VECTOR * VECTOR, stride // VECTOR * VECTOR
    rows = _page_rows(table_ptr, j, end, strides[0], strides[1], SIZE)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = ((j >= 0) & (j < end))[:, None] & (columns < tl.cdiv(width, VECTOR) * VECTOR)
    return tl.load(x_ptr + begin // VECTOR * VECTOR + rows + columns, mask=inside, other=0.0)
