#pragma once

#include "ptx.cuh"

// Adds a row tile, at these places in the slabs, to the sums of the row shifts of `set`. seen(x, ahead) is what outputs
// see of x, the scores of a column with rows r and r + 2, where ahead = column - r, counted from the lane's first such.
template <class Seen>
DEVICE void add_weight_gradient(float (&sums)[WEIGHT_PRODUCTS][4], u32 base, int in_s, int in_g, int set, int lane,
                                Seen seen) {
  constexpr int FIRST = GRADIENT_BEGIN / CHUNK, COUNT = (GRADIENT_END + CHUNK - 1) / CHUNK - FIRST;  // chunks of G
  constexpr int FIRST_WINDOW = FIRST + WEIGHT_FIRST;  // the first chunk of S that they touch
  u32 score_rows[WEIGHT_LOADS];
#pragma unroll
  for (int l = 0; l < WEIGHT_LOADS; ++l) {
    // Shifts past the kernel, which sum_diagonals leaves out, stop at CQ: the next row tile may be being written.
    const int shift = min(set * WEIGHT_SHIFTS + min(4 * l + (lane >> 3), WEIGHT_SHIFTS), CQ);
    score_rows[l] = slab_row<Scores>(base, in_s, lane & 7, shift - ROW_HALO);
  }
  const u32 gradient_rows = slab_row<Gradients>(base, in_g, lane & 7, lane >> 3 & 1);
  u32 loaded[COUNT + WEIGHT_CHUNKS][WEIGHT_LOADS][4], scores[COUNT + WEIGHT_CHUNKS][WEIGHT_SHIFTS + 1];
  u32 gradients[COUNT + 1][2];
  auto load = [&](int chunk) {
    if (chunk >= COUNT + WEIGHT_CHUNKS - 1 || FIRST_WINDOW + chunk < 0) return;
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
  load_matrices_transposed(gradients[0], gradient_rows + FIRST * CHUNK_BYTES);
#pragma unroll
  for (int chunk = 0; chunk < WEIGHT_CHUNKS - 1; ++chunk) convert(chunk);
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    convert(n + WEIGHT_CHUNKS - 1);
    load(n + WEIGHT_CHUNKS);
    if (n + 1 < COUNT) load_matrices_transposed(gradients[n + 1], gradient_rows + (FIRST + n + 1) * CHUNK_BYTES);
    const int column = (FIRST + n) * CHUNK + (lane >> 2);
    if (n == 0 && column < GRADIENT_BEGIN || n == COUNT - 1 && column >= GRADIENT_END)
      gradients[n][0] = gradients[n][1] = 0;
#pragma unroll
    for (int i = 0; i < WEIGHT_PRODUCTS; ++i) {
      const WeightProduct p = weight_product(i);
      const bool two = p.u2 >= 0;
      const u32 a[4] = {operand(n + p.d, p.u, 0), two ? operand(n + p.d2, p.u2, 0) : 0, operand(n + p.d, p.u + 1, 1),
                        two ? operand(n + p.d2, p.u2 + 1, 1) : 0};
      mma<Element>(sums[i], a, gradients[n][0], gradients[n][1]);
    }
  }
}

// Adds the diagonals of a warp's sums up, to one sum for each tap, in `tap_sums`. `block` is room for 64 words.
DEVICE void sum_diagonals(const float (&sums)[WEIGHT_PRODUCTS][4], float* block, float* tap_sums, int set, int lane) {
  for (int i = lane; i < CQ * CK; i += 32) tap_sums[i] = 0.f;
#pragma unroll
  for (int i = 0; i < WEIGHT_SUMS; ++i) {
    const WeightSum at = weight_sum(i);
    __syncwarp();
    block[lane * 2] = sums[at.product][2 * at.half];  // row lane / 4, columns 2 (lane % 4)..
    block[lane * 2 + 1] = sums[at.product][2 * at.half + 1];
    __syncwarp();
    const int diagonal = lane - 7;  // row - column
    const int u = set * WEIGHT_SHIFTS + at.u, v = CHUNK * (WEIGHT_FIRST + at.d) + diagonal + SHIFT;
    if (diagonal < 8 && u < CQ && 0 <= v && v < CK) {
      float sum = 0.f;
      for (int column = max(0, -diagonal); column < min(8, 8 - diagonal); ++column)
        sum += block[(column + diagonal) * 8 + column];
      tap_sums[u * CK + v] += sum;
    }
  }
}

// The sum of a tap over those of COUNT warps that have its row shift.
template <int COUNT>
DEVICE float sum_of_tap(const float* tap_sums, int tap) {
  float sum = 0.f;
  for (int w = tap / CK / WEIGHT_SHIFTS; w < COUNT; w += WEIGHT_SETS) sum += tap_sums[w * (CQ * CK) + tap];
  return sum;
}

// COUNT warps add up their sums of the taps of head h.
template <int COUNT>
DEVICE void store_weight_gradient(float* dw_sums, const float* tap_sums, int h, int batch, int b, int thread) {
  for (int tap = thread; tap < CQ * CK; tap += 32 * COUNT) {
    const long long row = static_cast<long long>(h * (CQ * CK) + tap) * batch + b;
    dw_sums[row * gridDim.y + blockIdx.y] = sum_of_tap<COUNT>(tap_sums, tap);
  }
}
