#pragma once

#include "ptx.cuh"

// Adds a row tile, at places in_s and in_g of the slabs, to the sums of the row shifts of `set`. Scores are fp16 and
// are converted to Elements here. seen(x, ahead) masks x, the scores of a column in rows r and r + 2, where ahead =
// column - r, counted from the lane's first column and row.
template <class Seen>
DEVICE void add_weight_gradient(float (&sums)[WEIGHT_PRODUCTS][4], u32 base, int in_s, int in_g, int set, int lane,
                                Seen seen) {
  u32 score_rows[WEIGHT_LOADS];
#pragma unroll
  for (int l = 0; l < WEIGHT_LOADS; ++l) {
    // Shifts past the filter, which sum_diagonals ignores, stop at CQ, because the next row tile may be being written.
    const int shift = min(set * WEIGHT_SHIFTS + min(4 * l + (lane >> 3), WEIGHT_SHIFTS), CQ);
    score_rows[l] = slab_row<Scores>(base, in_s, lane & 7, shift - ROW_HALO);
  }
  const u32 gradient_rows = slab_row<Gradients>(base, in_g, lane & 7, lane >> 3 & 1);
  constexpr int SCORE_CHUNKS = GRADIENT_CHUNKS + WEIGHT_CHUNKS - 1;  // chunks of S from FIRST_WINDOW on
  u32 loaded[SCORE_CHUNKS][WEIGHT_LOADS][4], scores[SCORE_CHUNKS][WEIGHT_SHIFTS + 1];
  u32 gradients[GRADIENT_CHUNKS + 1][2];
  auto load = [&](int chunk) {
    if (chunk >= SCORE_CHUNKS || FIRST_WINDOW + chunk < 0) return;
#pragma unroll
    for (int l = 0; l < WEIGHT_LOADS; ++l)
      load_matrices_transposed(loaded[chunk][l], score_rows[l] + (FIRST_WINDOW + chunk) * CHUNK_BYTES);
  };
  auto convert = [&](int chunk) {
#pragma unroll
    for (int u = 0; u <= WEIGHT_SHIFTS; ++u)
      scores[chunk][u] = FIRST_WINDOW + chunk < 0 ? 0 : as_elements<Element>(loaded[chunk][u / 4][u % 4]);
  };
  auto operand = [&](int chunk, int u, int odd) {
    return seen(scores[chunk][u], CHUNK * (FIRST_WINDOW + chunk) - odd);
  };
#pragma unroll
  for (int chunk = 0; chunk < WEIGHT_CHUNKS; ++chunk) load(chunk);
  load_matrices_transposed(gradients[0], gradient_rows + GRADIENT_FIRST * CHUNK_BYTES);
#pragma unroll
  for (int chunk = 0; chunk < WEIGHT_CHUNKS - 1; ++chunk) convert(chunk);
#pragma unroll
  for (int n = 0; n < GRADIENT_CHUNKS; ++n) {
    convert(n + WEIGHT_CHUNKS - 1);
    load(n + WEIGHT_CHUNKS);
    if (n + 1 < GRADIENT_CHUNKS)
      load_matrices_transposed(gradients[n + 1], gradient_rows + (GRADIENT_FIRST + n + 1) * CHUNK_BYTES);
    const int column = (GRADIENT_FIRST + n) * CHUNK + (lane >> 2);
    if (n == 0 && column < GRADIENT_BEGIN || n == GRADIENT_CHUNKS - 1 && column >= GRADIENT_END)
      gradients[n][0] = gradients[n][1] = 0;
#pragma unroll
    for (int i = 0; i < WEIGHT_PRODUCTS; ++i) {
      const WeightOperand x = weight_operand(weight_product(i).operand);
      const bool two = x.u2 >= 0;
      const int chunk = n + weight_product(i).d, chunk2 = chunk + x.apart;
      const u32 a[4] = {operand(chunk, x.u, 0), two ? operand(chunk2, x.u2, 0) : 0, operand(chunk, x.u + 1, 1),
                        two ? operand(chunk2, x.u2 + 1, 1) : 0};
      mma<Element>(sums[i], a, gradients[n][0], gradients[n][1]);
    }
  }
}
