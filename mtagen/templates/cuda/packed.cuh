#pragma once

#include "ptx.cuh"
#include "tensor_rows.cuh"

// A packed document. Tensors are (rows, heads, columns), in which the rows of document b begin at row cu_seq[b]. A
// schedule lists the documents and blocks of CTAs.
struct Packed {
  bool exists;   // whether the CTA has a block; the grid has a CTA for each possible block
  int b, h;      // the document, and the CTA's head
  int heads;     // heads of q
  int block;     // the CTA's block of rows
  int q0, k0;    // the first query and key in the tensors
  int n_q, n_k;  // queries and keys

  DEVICE Packed(int head, int heads, int number, const int* tiles, const int* cu_seq_q, const int* cu_seq_k)
      : h(head), heads(heads) {
    const int* const tile = tiles + 2 * number;
    exists = tile[0] >= 0;
    block = tile[1];
    b = max(tile[0], 0);
    q0 = cu_seq_q[b], k0 = cu_seq_k[b];
    n_q = cu_seq_q[b + 1] - q0, n_k = cu_seq_k[b + 1] - k0;
  }

  // Where the queries or the keys of head h begin in a tensor with these strides.
  DEVICE long long queries(int h, long long stride_n, long long stride_h) const { return q0 * stride_n + h * stride_h; }

  DEVICE long long keys(int h, long long stride_n, long long stride_h) const { return k0 * stride_n + h * stride_h; }

  // Query i of a head: its row in tensors of outputs, and among statistics with `pitch` rows per head.
  DEVICE long long output_row(int i) const { return static_cast<long long>(q0 + i) * heads + h; }

  DEVICE long long statistic(int i, int pitch) const { return static_cast<long long>(h) * pitch + q0 + i; }

  // ---- For CTAs that own keys: h is then a head of keys.

  // Keys that are loaded: keys of a document without queries are replaced by zeros, because they may hold NaN.
  DEVICE int loaded_keys() const { return n_q > 0 ? n_k : 0; }

  // Key j's row in gradients of keys.
  DEVICE long long key_row(int j) const { return static_cast<long long>(k0 + j) * heads + h; }

  // The block's number among those of a head, in the order of their keys, `rows` to a block. Each document may have one
  // block more than its keys fill.
  DEVICE u32 place_of_block(int rows) const { return k0 / rows + b + block; }

  // The number of head h, of `heads` heads of queries, among heads of statistics; and the row of query i in sums of dQ.
  DEVICE long long head_of_statistics(int h, int) const { return h; }

  DEVICE long long query_row(long long head, int i, int heads) const {
    return static_cast<long long>(q0 + i) * heads + head;
  }

  // Rows of statistics before the first query, if each sequence has `room` more than queries.
  DEVICE int statistics_before(int room) const { return q0 + b * room; }

  // All documents are one entry of a batch.
  DEVICE int entries(u32, int) const { return 1; }

  DEVICE int entry() const { return 0; }
};

// The keys of head h of a document, from key `first` on.
template <class Element>
DEVICE auto key_rows(const Packed& document, const Element* x, int h, long long stride_n, long long stride_h,
                     int first) {
  return TensorRows<Element>{x + document.keys(h, stride_n, stride_h) + first * stride_n, stride_n};
}
