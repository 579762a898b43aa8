#pragma once

#include "exponents.cuh"
#include "ptx.cuh"

// The log-sum-exp of a row with a sink, a logit without a value, from that without it. Both are in units of log2.
DEVICE float add_sink(float log_sum, float sink) {
  const float most = fmaxf(log_sum, sink);
  return most == -INFINITY ? most : most + log2f(exp2_fast(log_sum - most) + exp2_fast(sink - most));
}
