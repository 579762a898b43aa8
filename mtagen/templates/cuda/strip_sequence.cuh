#pragma once

#include "strip_visible.cuh"
#include "tensor_rows.cuh"

// ---- Where rows lie ------------------------------------------------------------------------------------------------

// The sequence of some rows of a strip. One of the structs that derive from it computes its numbers, and kernels call
// it Sequence. Its queries and keys are counted in the tensors, or in the strip's planes: key 0 of planes is key `key0`
// of the tensors, and rows top <= r < bottom are the sequence's.
struct SequenceRows {
  int number;       // of the sequence in the batch
  int first, off;   // row r is query first + r, which sits at position first + r + off
  int keys, limit;  // planes hold keys 0 <= j < keys, of which the sequence has those before `limit`
  int bottom;

  DEVICE int query(int r) const { return first + r; }

  DEVICE int position(int r) const { return first + r + off; }

  DEVICE bool has_row(int) const { return true; }

  DEVICE bool has_score(int, int) const { return true; }

  // The keys that row r sees, which are none in rows before row `from`.
  DEVICE VisibleKeys visible_keys(int r, int from) const {
    return VisibleKeys::of_row(position(r), r < from ? 0 : VisibleKeys::end_of_row(position(r), limit));
  }
};

// The rows of keys or values that head h reads, from key 0 of planes on; `group` heads read the same head of x, which
// has strides (b, h, n). Numbers are references: as values, they change the order of a kernel's first instructions.
template <class Sequence, class Element>
DEVICE auto rows_of_keys(const Sequence& sequence, const Element* x, const long long& stride_b,
                         const long long& stride_h, const long long& stride_n, const int& b, const int& h,
                         const int& group = 1) {
  return TensorRows<Element>{x + (b * stride_b + h / group * stride_h + sequence.key0 * stride_n), stride_n};
}
