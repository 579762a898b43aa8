#pragma once

#include "ptx.cuh"

// Sums the diagonals of a warp's sums, one sum per tap, to `tap_sums`. `block` has room for 64 words.
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

// The sum of a tap over those of COUNT warps that have the tap's row shift.
template <int COUNT>
DEVICE float sum_of_tap(const float* tap_sums, int tap) {
  float sum = 0.f;
  for (int w = tap / CK / WEIGHT_SHIFTS; w < COUNT; w += WEIGHT_SETS) sum += tap_sums[w * (CQ * CK) + tap];
  return sum;
}

// COUNT warps add their sums of the taps of head h, and store a term: that of entry b of `batch`, the `tile`-th of
// `tiles`.
template <int COUNT>
DEVICE void store_weight_gradient(float* dw_sums, const float* tap_sums, int h, int batch, int b, u32 tiles, u32 tile,
                                  int thread) {
  for (int tap = thread; tap < CQ * CK; tap += 32 * COUNT) {
    const long long row = static_cast<long long>(h * (CQ * CK) + tap) * batch + b;
    dw_sums[row * tiles + tile] = sum_of_tap<COUNT>(tap_sums, tap);
  }
}
