#pragma once

#include "ptx.cuh"

// ---- Hints to the compiler ------------------------------------------------------------------------------------------

// Tells the compiler that all lanes of the warp have the same x, which it may then keep in a uniform register.
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Reads threadIdx.x again, so that values derived from it take no register before or after their use.
DEVICE int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Returns a pointer whose memory the compiler reads again, for the same reason.
template <class T>
DEVICE const T* anew(const T* from) {
  asm volatile("" : "+l"(from));
  return from;
}

// x, whose relation to the argument the compiler does not see.
DEVICE int unrelated(int x) {
  asm("" : "+r"(x));
  return x;
}

// Keeps the compiler from moving loads across this point, where, as far as it knows, the thread may exit. x is not
// negative.
DEVICE void schedule_fence(int x) {
  asm volatile("{ .reg .pred ends; setp.lt.s32 ends, %0, 0; @ends exit; }" ::"r"(x) : "memory");
}

// Makes ptxas consider these registers defined from here on. Registers that are written only here are never read.
template <int N>
DEVICE void mark_defined(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(x[i]));
}

// Keeps a value in a register from here on, so that it is neither computed later nor computed again.
DEVICE void pin(u32& x) { asm volatile("" : "+r"(x)); }

template <int N>
DEVICE void pin(u32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) pin(x[i]);
}

template <int N>
DEVICE void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]));
}
