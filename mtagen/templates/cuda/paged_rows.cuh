#pragma once

#include "ptx.cuh"

// Rows of a sequence that lie in pages of SIZE rows each, which a table lists: the place of a loop over them, like
// TensorRows. Rows outside [0, count) are in no page, and their addresses are not read.
template <class Element, int SIZE>
struct PagedRows {
  const Element* pages;           // page 0, from the first column that is read
  long long stride_page, stride;  // elements from a page, and from a row, to the next
  const int* table;               // the pages of the sequence
  int count, j = 0;

  DEVICE PagedRows from(int row, int column) const {
    return {pages + column, stride_page, stride, table, count, j + row};
  }

  DEVICE const Element* address() const {
    return 0 <= j && j < count ? pages + (table[j / SIZE] * stride_page + j % SIZE * stride) : pages;
  }

  DEVICE void skip(int rows) { j += rows; }
};
