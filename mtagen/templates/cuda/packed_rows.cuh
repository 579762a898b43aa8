#pragma once

#include "ptx.cuh"

// The document of row `row` of a head's statistics: the last document whose statistics begin there or before.
DEVICE int document_of(const int* cu_seq, int documents, int row) {
  int b = 0;
  while (documents > 1) {
    const int half = documents / 2;
    const bool after = cu_seq[b + half] + (b + half) * ROW_ROOM <= row;
    b += after ? half : 0;
    documents = after ? documents - half : half;
  }
  return b;
}

// A row of the statistics of a head, and the query that it belongs to.
struct PackedRow {
  int h, i;             // head, and query of the tensors
  bool exists;          // whether there is a query
  long long output;     // its row in tensors of outputs
  long long statistic;  // its place in log-sum-exps

  DEVICE PackedRow(int head, int row, int heads, int total_q, const int* cu_seq_q, int documents) : h(head) {
    const int b = document_of(cu_seq_q, documents, row);
    i = row - b * ROW_ROOM;
    exists = i < cu_seq_q[b + 1];
    output = static_cast<long long>(i) * heads + head;
    statistic = static_cast<long long>(head) * total_q + i;
  }

  // Where the query's row begins in a tensor with these strides.
  DEVICE long long at(long long stride_n, long long stride_h) const { return h * stride_h + i * stride_n; }
};

// The block of keys of a document that the schedule has under a number.
struct PackedKeys {
  bool exists;
  long long head;
  int block, n_k, k0, kv_heads;
  u32 place;  // the block's number among those of the head, see Packed

  DEVICE PackedKeys(long long head, int number, const int* tiles, const int* cu_seq_k, int kv_heads)
      : head(head), kv_heads(kv_heads) {
    const int b = tiles[2 * number];
    exists = b >= 0;
    if (!exists) return;
    block = tiles[2 * number + 1];
    k0 = cu_seq_k[b], n_k = cu_seq_k[b + 1] - k0;
    place = k0 / OWNED + b + block;
  }

  // Key j's row in gradients of keys.
  DEVICE long long row(int j) const { return static_cast<long long>(k0 + j) * kv_heads + head; }
};
