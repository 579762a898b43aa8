#pragma once

#include "ptx.cuh"

// ---- Convolution with a filter of one tap: scores are multiplied in their registers ---------------------------------

// c = s times the tap; finish(n) is called when the 8 columns of tile n are complete.
template <int N, class Finish>
DEVICE void multiply_by_tap(float (&c)[N], const float (&s)[N], float tap, Finish finish) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[4 * n + e] = s[4 * n + e] * tap;
    finish(n);
  }
}
