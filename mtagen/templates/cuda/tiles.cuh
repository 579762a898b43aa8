#pragma once

#include "softmax.cuh"
#include "swizzle.cuh"

// ---- Rows of queries into shared memory, and results out of registers ----------------------------------------------

// COPIERS threads copy COUNT rows of queries to the rows from p on of a tile, whose first row is row `first` of a
// tensor of n_rows rows; rows that do not exist are zeros. In each 16 rows, place g has row 2 g and place g + 8 has row
// 2 g + 1. So a thread's two rows of an mma's or wgmma's result are neighbours, as the convolution expects.
template <int ROWS, int COLUMNS, int COUNT, int COPIERS, class Element>
DEVICE void load_queries(u32 tile, int p, const Element* q, long long stride, int first, int n_rows, int thread) {
#pragma unroll 4
  for (int i = thread; i < COUNT * (COLUMNS / CHUNK); i += COPIERS) {
    const int r = p + i / (COLUMNS / CHUNK), column = i % (COLUMNS / CHUNK);
    const int row = first + (r & ~15) + 2 * (r & 7) + (r >> 3 & 1);
    const bool exists = static_cast<unsigned>(row) < static_cast<unsigned>(n_rows);
    copy_async(tile_address<ROWS>(tile, r, column), q + (exists ? row : 0) * stride + column * CHUNK, exists);
  }
}

// Each of the threads of load_queries multiplies the elements that it has copied by a power of two, which is exact in
// bf16.
template <class Element, int ROWS, int COLUMNS, int COUNT, int COPIERS>
DEVICE void scale_queries(u32 tile, int p, float factor, int thread) {
#pragma unroll 4
  for (int i = thread; i < COUNT * (COLUMNS / CHUNK); i += COPIERS) {
    const u32 at = tile_address<ROWS>(tile, p + i / (COLUMNS / CHUNK), i % (COLUMNS / CHUNK));
    u32 x[4];
    load_shared(x, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 pair = unpack<Element>(x[e]);
      x[e] = pack<Element>(pair.x * factor, pair.y * factor);
    }
    store_shared(at, x[0], x[1], x[2], x[3]);
  }
}

// Multiplies scores by a power of two.
template <int N>
DEVICE void scale_scores(float (&s)[N], float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] *= factor;
}
