#pragma once

#include "ptx.cuh"

// A row of the statistics of a head, counted over the whole batch, and the query that it belongs to.
struct BatchRow {
  int b, h, i;          // entry of the batch, head, and query
  bool exists;          // whether there is a query
  long long output;     // its row in tensors of outputs
  long long statistic;  // its place in log-sum-exps

  DEVICE BatchRow(int head, int row, int heads, int n_q) : b(head / heads), h(head % heads), i(row), exists(row < n_q) {
    output = statistic = static_cast<long long>(head) * n_q + row;
  }

  // Where the query's row begins in a tensor with these strides.
  DEVICE long long at(long long stride_b, long long stride_h, long long stride_n) const {
    return b * stride_b + h * stride_h + i * stride_n;
  }
};

// A block of keys of a head, counted over the whole batch.
struct BatchKeys {
  static constexpr bool exists = true;
  long long head;
  int block, n_k;
  u32 place;  // the block's number among those of the head

  DEVICE BatchKeys(long long head, int block, int n_k) : head(head), block(block), n_k(n_k), place(block) {}

  // Key j's row in gradients of keys.
  DEVICE long long row(int j) const { return head * n_k + j; }
};
