#pragma once

#include "ptx.cuh"
#include "tensor_rows.cuh"

// An entry of a batch, whose tensors are (batch, heads, rows, columns). All entries have the same number of rows.
struct Batch {
  static constexpr bool exists = true;  // the CTA has a block
  int head;                             // the CTA's head, counted over the whole batch
  int b, h;                             // the entry, and the head in it
  int block;                            // the CTA's block of rows
  int n_q, n_k;                         // queries and keys

  // The head is one of `heads` of an entry.
  DEVICE Batch(u32 head, int heads, int block, int n_q, int n_k)
      : head(head), b(head / heads), h(head % heads), block(block), n_q(n_q), n_k(n_k) {}

  // Where the queries or the keys of head h begin in a tensor with these strides.
  DEVICE long long queries(int h, long long stride_b, long long stride_h, long long) const {
    return b * stride_b + h * stride_h;
  }

  DEVICE long long keys(int h, long long stride_b, long long stride_h, long long stride_n) const {
    return queries(h, stride_b, stride_h, stride_n);
  }

  // Query i of the CTA's head: its row in tensors of outputs, and among statistics with `pitch` rows per head.
  DEVICE long long output_row(int i) const { return static_cast<long long>(head) * n_q + i; }

  DEVICE long long statistic(int i, int pitch) const { return static_cast<long long>(head) * pitch + i; }

  // ---- For CTAs that own keys: h is then a head of keys.

  // Keys that are loaded.
  DEVICE int loaded_keys() const { return n_k; }

  // Key j's row in gradients of keys.
  DEVICE long long key_row(int j) const { return static_cast<long long>(head) * n_k + j; }

  // The block's number among those of a head, in the order of their keys.
  DEVICE u32 place_of_block(int) const { return block; }

  // The number of head h, of `heads` heads of queries, among heads of statistics; and the row of query i in sums of dQ.
  DEVICE long long head_of_statistics(int h, int heads) const { return b * heads + h; }

  DEVICE long long query_row(long long head, int i, int) const { return head * n_q + i; }

  // Rows of statistics before the first query, if each sequence has `room` more than queries.
  DEVICE int statistics_before(int) const { return 0; }

  // The number of entries, and that of this entry.
  DEVICE int entries(u32 heads_of_batch, int heads) const { return heads_of_batch / heads; }

  DEVICE int entry() const { return b; }
};

// The keys of head h of an entry, from key `first` on.
template <class Element>
DEVICE auto key_rows(const Batch& entry, const Element* x, int h, long long stride_b, long long stride_h,
                     long long stride_n, int first) {
  return TensorRows<Element>{x + entry.keys(h, stride_b, stride_h, stride_n) + first * stride_n, stride_n};
}
