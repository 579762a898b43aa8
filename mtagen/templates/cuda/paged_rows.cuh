#pragma once

#include "ptx.cuh"

// Rows of a sequence that lie in pages of SIZE rows each, which a table lists: the place of a loop over them, like
// TensorRows. The table is read once for each page. Rows outside [0, count) are in no page, and must not be read.
template <class Element, int SIZE>
struct PagedRows {
  const Element* pages;           // page 0, from the first column that is read
  long long stride_page, stride;  // elements from a page, and from a row, to the next
  const int* table;               // the pages of the sequence
  int count, j = 0;
  const Element* row = nullptr;  // row j

  DEVICE PagedRows from(int first, int column) const {
    PagedRows rows = {pages + column, stride_page, stride, table, count, j + first};
    rows.find();
    return rows;
  }

  DEVICE const Element* address() const { return row; }

  DEVICE void skip(int rows) {
    const bool stays = (j & -SIZE) == (j + rows & -SIZE);
    j += rows, row += rows * stride;
    if (!stays) find();
  }

  DEVICE void find() { row = pages + (0 <= j && j < count ? table[j / SIZE] * stride_page + j % SIZE * stride : 0); }
};
