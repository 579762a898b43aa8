#pragma once

#include "rows.cuh"

// ---- Factors of keys -----------------------------------------------------------------------------------------------

// WIDTH factors of each element of a tile: RANK by which heads are summed, RANK by which sums are added to heads, and a
// gate.
template <int WIDTH>
struct KeyFactors {
  static constexpr int RANK = WIDTH / 2;
  float x[WIDTH][8];

  // token(e) is the place of element e in (batch, heads, keys), or -1 if its key does not exist.
  template <class Token>
  DEVICE void load(const float* factors, Token token) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const long long at = token(e);
#pragma unroll
      for (int f = 0; f < WIDTH; ++f) x[f][e] = at < 0 ? 0.f : __ldg(factors + at * WIDTH + f);
    }
  }

  // The sums over heads of a tile times each of RANK factors from FIRST on, for a lane's two keys. The heads of a key
  // lie in four lanes.
  template <int FIRST>
  DEVICE void sum_heads(float (&sums)[RANK][2], const Tile& tile) const {
#pragma unroll
    for (int f = 0; f < RANK; ++f)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float sum = 0.f;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int e = 4 * m + 2 * k; e < 4 * m + 2 * k + 2; ++e) sum += tile[e] * x[FIRST + f][e];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sums[f][k] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
      }
  }

  // y += the sums times RANK factors from FIRST on, and the gates times the tile.
  template <int FIRST>
  DEVICE void add_to(Tile& y, const float (&sums)[RANK][2], const Tile& tile) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      y[e] += x[2 * RANK][e] * tile[e];
#pragma unroll
      for (int f = 0; f < RANK; ++f) y[e] += x[FIRST + f][e] * sums[f][e >> 1 & 1];
    }
  }

  // Adds the products of a tile with the sums to RANK factors from FIRST on.
  template <int FIRST>
  DEVICE void add_products(const Tile& tile, const float (&sums)[RANK][2]) {
#pragma unroll
    for (int f = 0; f < RANK; ++f)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[FIRST + f][e] += tile[e] * sums[f][e >> 1 & 1];
  }

  DEVICE void add_gates(const Tile& y, const Tile& z) {
#pragma unroll
    for (int e = 0; e < 8; ++e) x[2 * RANK][e] += y[e] * z[e];
  }
};

// ---- Matrices of rows ----------------------------------------------------------------------------------------------
//
// A matrix (16, 16) lies in shared memory, 32 bytes for each row. The two chunks of every other four rows are
// exchanged, so that eight rows of a column of chunks touch all banks.

// The byte of chunk `part`, counted along rows.
DEVICE u32 swizzled_matrix(int part) { return (part ^ (part >> 3 & 1)) * CHUNK_BYTES; }

DEVICE u32 chunk_of_matrix(u32 matrix, int row, int column) { return matrix + swizzled_matrix(2 * row + column); }

// The right operand of y = x M^T: parts n and k of y's and x's heads are b[2 n + k].
DEVICE void load_matrix(u32 (&b)[4], u32 matrix, int lane) {
  load_matrices(b, chunk_of_matrix(matrix, 8 * (lane >> 4) + (lane & 7), lane >> 3 & 1));
}

// The right operand of dx = dy M.
DEVICE void load_matrix_transposed(u32 (&b)[4], u32 matrix, int lane) {
  load_matrices_transposed(b, chunk_of_matrix(matrix, 8 * (lane >> 3 & 1) + (lane & 7), lane >> 4));
}

// ---- Sums over keys ------------------------------------------------------------------------------------------------

// Tile i of a block as the left operand of a product that sums over keys: 16 heads by 16 keys.
DEVICE void load_heads_of(Operand& a, u32 block, int i, int lane) {
  load_matrices(a, in_block(block, 8 * (lane >> 3 & 1) + (lane & 7), 2 * i + (lane >> 4)));
}

// As the right operand: heads 8 n and keys 8 k of the tile are a[2 n + k].
DEVICE void load_heads_by(Operand& a, u32 block, int i, int lane) {
  load_matrices(a, in_block(block, 8 * (lane >> 4) + (lane & 7), 2 * i + (lane >> 3 & 1)));
}

// A mask of the two keys of a lane in such operands, of 8 keys from `key` on: ones where they are visible.
DEVICE u32 shown_keys(VisibleKeys seen, int key, int lane) {
  const int j = key + 2 * (lane & 3);
  return (seen.has(j) ? 0xffffu : 0u) | (seen.has(j + 1) ? 0xffff0000u : 0u);
}
