#pragma once

#include "compiler.cuh"
#include "ptx.cuh"

// With three row shifts, operand 0 is that of row shifts 0 and 2. Its words are the scores of row shifts 0 and 2 for
// outputs in even rows, and of 1 and 3 for outputs in odd rows. This is the number of a row shift's word.
DEVICE constexpr int word_of_shift(int shift) { return 2 * (shift & 1) + (shift >> 1); }

// Adds a row tile, at places in_s and in_g of the slabs, to the sums of the row shifts of `set`. Scores are Elements.
// Operands are loaded as they are multiplied, except an operand whose blocks are chunks apart, which is derived from
// operand 0's words. seen(x, ahead) masks x, the scores of a column in rows r and r + 2, where ahead = column - r,
// counted from the lane's first column and row.
template <class Seen>
DEVICE void add_weight_gradient(float (&sums)[WEIGHT_PRODUCTS][4], u32 base, int in_s, int in_g, int set, int lane,
                                Seen seen) {
  constexpr int SCORE_CHUNKS = GRADIENT_CHUNKS + WEIGHT_CHUNKS - 1;  // chunks of S from FIRST_WINDOW on
  const bool second = lane >> 3 & 1, odd = lane >> 4;                // the matrix whose row the lane addresses
  u32 score_rows[WEIGHT_OPERANDS];
#pragma unroll
  for (int i = 0; i < WEIGHT_OPERANDS; ++i) {
    const WeightOperand x = weight_operand(i);
    const int shift = set * WEIGHT_SHIFTS + (second && x.u2 >= 0 ? x.u2 : x.u) + odd;
    // Shifts past the filter, which sum_diagonals ignores, may end past the row tile and wrap to its beginning.
    const int row = 2 * (lane & 7) + shift - ROW_HALO, above = in_s ? in_s - 1 : SCORE_RING - 1;
    score_rows[i] = row_of_first_tile<Scores>(base, row & ROW_TILE - 1) + (row < 0 ? above : in_s) * SLAB_TILE;
  }
  const u32 gradient_rows = row_of_first_tile<Gradients>(base, 2 * (lane & 7) + second) + in_g * SLAB_TILE;

  // The compiler would copy the words of a derived operand for each product that takes it. An exclusive or with a zero
  // that the compiler cannot see, another one for each block, avoids that.
  u32 zeros[2] = {static_cast<u32>(in_s), static_cast<u32>(in_g)};
#pragma unroll
  for (u32& zero : zeros) {
    pin(zero);
    zero >>= 8;
  }

  u32 loaded[SCORE_CHUNKS][WEIGHT_OPERANDS][4], gradients[GRADIENT_CHUNKS][2];
  auto load = [&](int chunk) {
    if (chunk < GRADIENT_CHUNKS) {
      load_matrices_transposed(gradients[chunk], gradient_rows + (GRADIENT_FIRST + chunk) * CHUNK_BYTES);
      const int column = (GRADIENT_FIRST + chunk) * CHUNK + (lane >> 2);
      if (chunk == 0 && column < GRADIENT_BEGIN || chunk == GRADIENT_CHUNKS - 1 && column >= GRADIENT_END)
        gradients[chunk][0] = gradients[chunk][1] = 0;
    }
    if (chunk >= SCORE_CHUNKS) return;
#pragma unroll
    for (int i = 0; i < WEIGHT_OPERANDS; ++i) {
      u32(&x)[4] = loaded[chunk][i];
      if (FIRST_WINDOW + chunk < 0)
        x[0] = x[1] = x[2] = x[3] = 0;
      else if (!weight_operand(i).apart)
        load_matrices_transposed(x, score_rows[i] + (FIRST_WINDOW + chunk) * CHUNK_BYTES);
    }
  };
#pragma unroll
  for (int chunk = 0; chunk < WEIGHT_AHEAD; ++chunk) load(chunk);
#pragma unroll
  for (int chunk = 0; chunk < SCORE_CHUNKS; ++chunk) {
    load(chunk + WEIGHT_AHEAD);
    if (WEIGHT_AHEAD) schedule_fence(in_g);  // otherwise the compiler would move loads to the use of their words
#pragma unroll
    for (int i = 0; i < WEIGHT_OPERANDS; ++i) {
      const WeightOperand x = weight_operand(i);
      const int first = chunk - x.apart;  // the chunk of the first block
      if (first < 0 || FIRST_WINDOW + chunk < 0) continue;
      u32 a[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int from = m & 1 ? chunk : first, row = m >> 1;
        const u32 word = x.apart ? loaded[from][0][word_of_shift(x.u + row)] ^ zeros[m & 1] : loaded[chunk][i][m];
        a[m] = seen(word, CHUNK * (FIRST_WINDOW + from) - row);
      }
#pragma unroll
      for (int product = 0; product < WEIGHT_PRODUCTS; ++product) {
        const WeightProduct p = weight_product(product);
        const int n = first - p.d;
        if (p.operand == i && 0 <= n && n < GRADIENT_CHUNKS)
          mma<Element>(sums[product], a, gradients[n][0], gradients[n][1]);
      }
    }
  }
}
