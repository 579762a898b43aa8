#pragma once

#include "paged_rows.cuh"
#include "strip_packed.cuh"

// A packed document whose keys lie in pages of PAGE_SIZE. They count from the first key of the document.
struct PagedPacked : Packed {
  const int* table;  // the document's pages

  DEVICE PagedPacked(int b, int r0, int rows, const int* documents, const int* block_table, int table_width, int place0,
                     int count, int skip)
      : Packed(b, r0, rows, documents, place0, count, skip), table(block_table + number * table_width) {}
};

template <class Element>
DEVICE auto rows_of_keys(const PagedPacked& sequence, const Element* x, const long long& stride_page,
                         const long long& stride_h, const long long& stride_n, const int&, const int& h,
                         const int& group = 1) {
  const int end = sequence.key0 + sequence.limit;
  return PagedRows<Element, PAGE_SIZE>{x + h / group * stride_h, stride_page, stride_n,
                                       sequence.table,           end,         sequence.key0};
}
