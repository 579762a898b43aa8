#pragma once

#include "exponents.cuh"
#include "ptx.cuh"

// log2(2^a + 2^b). It adds to the log-sum-exp of a row in units of log2: a sink, a logit without a value; or the keys
// of another section.
DEVICE float add_logarithms(float a, float b) {
  const float most = fmaxf(a, b);
  return most == -INFINITY ? a + b : most + log2f(exp2_fast(a - most) + exp2_fast(b - most));
}

// add_logarithms of the sums of sections begin <= i < end, in order for each of 8 lanes, whose numbers differ by
// multiples of 4.
DEVICE float merge_log_sums(const float* log_sums, int begin, int end, int lane) {
  float result = -INFINITY;
  for (int i = begin + (lane >> 2); i < end; i += 8) result = add_logarithms(result, __ldg(log_sums + i));
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) result = add_logarithms(result, __shfl_xor_sync(0xffffffffu, result, mask));
  return result;
}
