#pragma once

#include "exponents.cuh"
#include "rows.cuh"

// ---- Softmax -------------------------------------------------------------------------------------------------------

// The largest x of each head and the sum of 2^(VALUE_EXPONENT (x - largest)), over the keys that a lane has seen.
// VALUE_EXPONENT is positive.
struct Statistics {
  float largest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, total[4] = {};

  // Adds a block's tiles.
  DEVICE void add(const Tile (&x)[TILES_OF_BLOCK]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int first = 4 * (n >> 1) + (n & 1);
      float top = largest[n];
#pragma unroll
      for (int i = 0; i < TILES_OF_BLOCK; ++i) top = fmaxf(top, fmaxf(x[i][first], x[i][first + 2]));
      const float shift = shift_of(top);
      float sum = total[n] * exp2_fast(VALUE_EXPONENT * largest[n] - shift);
#pragma unroll
      for (int i = 0; i < TILES_OF_BLOCK; ++i)
        sum += exp2_fast(VALUE_EXPONENT * x[i][first] - shift) + exp2_fast(VALUE_EXPONENT * x[i][first + 2] - shift);
      largest[n] = top, total[n] = sum;
    }
  }

  // The number to subtract from exponents so that the largest becomes 0; or 0 if the lane has seen no key.
  DEVICE static float shift_of(float top) { return top == -INFINITY ? 0.f : VALUE_EXPONENT * top; }

  DEVICE void merge(int n, float other, float sum) {
    const float top = fmaxf(largest[n], other), shift = shift_of(top);
    total[n] =
        total[n] * exp2_fast(VALUE_EXPONENT * largest[n] - shift) + sum * exp2_fast(VALUE_EXPONENT * other - shift);
    largest[n] = top;
  }

  // log2 of the sum of 2^(VALUE_EXPONENT x) over all keys, for the lane's 4 heads. `shared` has room for 32 floats per
  // warp.
  template <int WARPS>
  DEVICE void log_sums(float (&result)[4], float* shared, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        merge(n, __shfl_xor_sync(0xffffffffu, largest[n], mask), __shfl_xor_sync(0xffffffffu, total[n], mask));
      if (lane < 4) {
        float* to = shared + (warp * MAX_HEADS + head_of(n, lane)) * 2;
        to[0] = largest[n], to[1] = total[n];
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      largest[n] = -INFINITY, total[n] = 0.f;
      for (int w = 0; w < WARPS; ++w) {
        const float* from = shared + (w * MAX_HEADS + head_of(n, lane)) * 2;
        merge(n, from[0], from[1]);
      }
      result[n] = VALUE_EXPONENT * largest[n] + log2f(total[n]);
    }
  }
};
