#pragma once

#include "ptx.cuh"

// A packed document. Tensors are (rows, heads, columns), in which the rows of document b begin at row cu_seq[b]. A
// schedule lists the documents and blocks of CTAs.
struct Packed {
  bool exists;   // whether the CTA has a block; the grid has a CTA for each possible block
  int b, h;      // the document, and the CTA's head
  int block;     // the CTA's block of rows
  int q0, k0;    // the first query and key in the tensors
  int n_q, n_k;  // queries and keys

  DEVICE Packed(int head, int, int number, const int* tiles, const int* cu_seq_q, const int* cu_seq_k) : h(head) {
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
  DEVICE long long output_row(int i, int heads) const { return static_cast<long long>(q0 + i) * heads + h; }

  DEVICE long long statistic(int i, int pitch) const { return static_cast<long long>(h) * pitch + q0 + i; }
};
