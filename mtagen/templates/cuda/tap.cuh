#pragma once

#include "ptx.cuh"

// The tap of head h. A null `weight` stands for taps of 1.
DEVICE const float* tap_of(const float* weight, int h) {
  static const float one = 1.f;
  return weight ? weight + h : &one;
}
