#pragma once

#include "ptx.cuh"

// Rows of a tensor that lie one after the other: the place of a loop over them.
template <class Element>
struct TensorRows {
  const Element* row;  // the current row, from its first column that is read
  long long stride;    // elements from a row to the next

  // The rows from row j on, without their first columns.
  DEVICE TensorRows from(int j, int column) const { return {row + (j * stride + column), stride}; }

  DEVICE const Element* address() const { return row; }

  DEVICE void skip(int rows) { row += rows * stride; }
};
