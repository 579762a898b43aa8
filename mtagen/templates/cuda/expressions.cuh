#pragma once

#include "exponents.cuh"
#include "ptx.cuh"

DEVICE float exp_of(float x) { return exp2_fast(x * LOG2_E); }

// Errs by a few 2^-24, because the quotient is subtracted from 1.
DEVICE float tanh_of(float x) { return 1.f - __fdividef(2.f, 1.f + exp_of(2.f * x)); }

// Errs by 2^-11 of the value.
DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Unlike fminf, it keeps NaN.
DEVICE float min_of(float a, float b) { return a <= b || a != a ? a : b; }

// Unlike fmaxf, it keeps NaN.
DEVICE float max_of(float a, float b) { return a >= b || a != a ? a : b; }
