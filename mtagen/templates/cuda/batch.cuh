#pragma once

#include "ptx.cuh"

// An entry of a batch, whose tensors are (batch, heads, rows, columns). All entries have the same number of rows.
struct Batch {
  static constexpr bool exists = true;  // the CTA has a block
  int head;                             // the CTA's head, counted over the whole batch
  int b, h;                             // the entry, and the head in it
  int block;                            // the CTA's block of rows
  int n_q, n_k;                         // queries and keys

  DEVICE Batch(int head, int heads, int block, int n_q, int n_k)
      : head(head), b(head / heads), h(head % heads), block(block), n_q(n_q), n_k(n_k) {}

  // Where the queries or the keys of head h begin in a tensor with these strides.
  DEVICE long long queries(int h, long long stride_b, long long stride_h, long long) const {
    return b * stride_b + h * stride_h;
  }

  DEVICE long long keys(int h, long long stride_b, long long stride_h, long long stride_n) const {
    return queries(h, stride_b, stride_h, stride_n);
  }

  // Query i of a head of the batch: its row in tensors of outputs, and among statistics with `pitch` rows per head.
  DEVICE long long output_row(int i, int) const { return static_cast<long long>(head) * n_q + i; }

  DEVICE long long statistic(int i, int pitch) const { return static_cast<long long>(head) * pitch + i; }
};
