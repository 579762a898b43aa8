#pragma once

#include "paged_rows.cuh"
#include "strip_step.cuh"

// A sequence of a decode step whose keys lie in pages of PAGE_SIZE.
struct PagedStep : Step {
  const int* table;  // the sequence's pages

  DEVICE PagedStep(int number, int r0, int rows, const int* seqlens, int has_seqlens, int longest,
                   const int* block_table, int table_width, int count, int keys, int first = 0)
      : Step(number, r0, rows, seqlens, has_seqlens, longest, count, keys, first),
        table(block_table + number * table_width) {}
};

template <class Element>
DEVICE auto rows_of_keys(const PagedStep& sequence, const Element* x, const long long& stride_page,
                         const long long& stride_h, const long long& stride_n, const int&, const int& h,
                         const int& group = 1) {
  const int end = sequence.key0 + sequence.limit;
  return PagedRows<Element, PAGE_SIZE>{x + h / group * stride_h, stride_page, stride_n,
                                       sequence.table,           end,         sequence.key0};
}
