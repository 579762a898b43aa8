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

// The same rows for a loop in which the lanes of a warp together read rows of at most 32 pages. Each lane looks up one
// page, and hands its place to the lanes that read it. So the table can be read long before the loop, and no lane waits
// for the table between two rows. All lanes of the warp ask for an address together.
template <class Element, int SIZE>
struct WarpPagedRows {
  const Element* row;             // where row j would be if rows lay one after the other, from its first column
  long long stride_page, stride;  // elements from a page, and from a row, to the next
  const int* table;               // the pages of the sequence
  int count, j = 0;
  mutable int begin = 0;         // first row of lane 0's page
  mutable long long offset = 0;  // elements from where the lane's page would be to where it is

  // Looks up 32 pages. The next loop reads no row before `first`.
  DEVICE const WarpPagedRows& look_up(int first) const {
    begin = first & -SIZE, offset = 0;
    const int own = begin + (threadIdx.x & 31) * SIZE;  // first row of the lane's page
    if (0 <= own && own < count) offset = table[own / SIZE] * stride_page - own * stride;
    return *this;
  }

  DEVICE WarpPagedRows from(int first, int column) const {
    return {row + (first * stride + column), stride_page, stride, table, count, first, begin, offset};
  }

  DEVICE const Element* address() const { return row + __shfl_sync(~0u, offset, static_cast<u32>(j - begin) / SIZE); }

  DEVICE void skip(int rows) { j += rows, row += rows * stride; }
};
