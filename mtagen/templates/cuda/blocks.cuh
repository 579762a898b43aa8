#pragma once

#include "swizzle.cuh"

// ---- Products of tiles in shared memory --------------------------------------------------------------------------

// The addresses that a lane passes to ldmatrix, for a tile of TILE_ROWS rows in blocks of 16 rows by 16 columns. The
// four 8x8 matrices of a block are ordered down first, then right. EXCHANGED: right first, for operands that memory
// holds in another order than the instruction takes. Blocks are counted from the first block, whose column is below a
// power of two that divides the other columns.
template <int TILE_ROWS, bool EXCHANGED>
struct Blocks {
  u32 at;

  DEVICE Blocks(u32 tile, int row, int column, int lane) {
    const int below = EXCHANGED ? (lane & 7) + (lane >> 4) * 8 : lane & 15;
    const int right = EXCHANGED ? lane >> 3 & 1 : lane >> 4;
    at = tile_address<TILE_ROWS>(tile, row + below, 2 * column + right);
  }

  DEVICE u32 operator()(int row, int column) const { return tile_address_from<TILE_ROWS>(at, 16 * row, 2 * column); }
};

template <bool TRANSPOSED>
DEVICE void load_block(u32 (&x)[4], u32 row) {
  if constexpr (TRANSPOSED)
    load_matrices_transposed(x, row);
  else
    load_matrices(x, row);
}

// c[16 M x 16 N] += a[16 M x 16 K] b[16 K x 16 N]. a(m, k) and b(k, n) return the addresses of blocks. A and B say
// whether the blocks of a and b are loaded transposed.
template <bool A, bool B, int K, int M, int N, class Left, class Right>
DEVICE void multiply(float (&c)[M][N][8], Left a, Right b) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    u32 x[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_block<A>(x[m], a(m, k));
#pragma unroll
    for (int n = 0; n < N; ++n) {
      u32 y[4];
      load_block<B>(y, b(k, n));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma<Element>(c[m][n], x[m], y[0], y[1]);
        mma<Element>(c[m][n] + 4, x[m], y[2], y[3]);
      }
    }
  }
}
