#pragma once

#include "packed.cuh"
#include "paged_rows.cuh"

// A packed document whose keys and values lie in pages of PAGE_SIZE.
struct Paged : Packed {
  const int* table;  // the document's pages

  DEVICE Paged(int head, int heads, int number, const int* tiles, const int* cu_seq_q, const int* cu_seq_k,
               const int* block_table, int table_width)
      : Packed(head, heads, number, tiles, cu_seq_q, cu_seq_k), table(block_table + b * table_width) {}
};

// The keys of head h of a document, from key `first` on, of which n_k are left.
template <class Element>
DEVICE auto key_rows(const Paged& document, const Element* x, int h, long long stride_page, long long stride_h,
                     long long stride_n, int first) {
  return PagedRows<Element, PAGE_SIZE>{x + h * stride_h, stride_page,          stride_n,
                                       document.table,   first + document.n_k, first};
}
