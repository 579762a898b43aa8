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
def _load_pages(x_ptr, table_ptr, j, end, stride_page, stride, width, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows j of a sequence, (rows, COLUMNS); 0 outside [0, end) and from column `width` on."""
    rows = _page_rows(table_ptr, j, end, stride_page, stride, SIZE)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = ((j >= 0) & (j < end))[:, None] & (columns < width)
    return tl.load(x_ptr + rows + columns, mask=inside, other=0.0)
