#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---- Instructions ---------------------------------------------------------------------------------------------------

using u32 = unsigned int;
using bf16 = __nv_bfloat16;
using fp16 = __half;

using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__
#ifndef INFINITY  // NVRTC has no <math.h>
#define INFINITY __int_as_float(0x7f800000)
#endif

// Elements of 16 bits that are moved together, in shared memory and by ldmatrix.
constexpr int CHUNK = 8;

constexpr int CHUNK_BYTES = 16;

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes to shared memory, or zeros if not `valid`, asynchronously.
DEVICE void copy_async(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Copies the first `bytes` of 16 bytes, and zeros instead of the others.
DEVICE void copy_part_async(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// copy_async for data that is read in order: the rest of its 128 bytes is prefetched to L2.
DEVICE void copy_async_stream(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// Copies 4 bytes.
DEVICE void copy_word_async(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Commits the copies since the last commit as a group, for copy_wait.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

DEVICE void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits until the copies of all but the last PENDING groups have arrived.
template <int PENDING>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void store_shared(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

DEVICE void store_shared(u32 to, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], { %1, %2 };" ::"r"(to), "r"(x), "r"(y) : "memory");
}

DEVICE void store_shared(u32 to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4 };" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Stores the low half of x.
DEVICE void store_shared_half(u32 to, u32 x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(static_cast<unsigned short>(x)) : "memory");
}

// Stores the low half of x at `to` and its high half at `to_high`.
DEVICE void store_shared_halves(u32 to, u32 to_high, u32 x) {
  asm volatile(
      "{ .reg .b16 low, high; mov.b32 { low, high}, %2; "
      "st.shared.b16 [%0], low; st.shared.b16 [%1], high; }" ::"r"(to),
      "r"(to_high), "r"(x)
      : "memory");
}

DEVICE u32 load_shared(u32 from) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

// Stores 16 bytes to global memory with a hint that L2 need not keep them.
DEVICE void store_global(void* to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.global.cs.v4.b32 [%0], { %1, %2, %3, %4 };" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEVICE void load_shared(u32 (&x)[2], u32 from) {
  asm volatile("ld.shared.v2.b32 { %0, %1 }, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from) : "memory");
}

DEVICE void load_shared(u32 (&x)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

// Loads four or two 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8. In each
// matrix a lane receives columns 2 lane_pair and 2 lane_pair + 1 of row lane_row, where lane_row = lane / 4 and
// lane_pair = lane % 4.
DEVICE void load_matrices(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

DEVICE void load_matrices(u32 (&x)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 { %0, %1 }, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(row)
               : "memory");
}

// Loads 8 x 8 matrices, transposed; lane i has the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices_transposed(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

DEVICE void load_matrices_transposed(u32 (&x)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { %0, %1 }, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(row)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements in the layout of load_matrices.
DEVICE u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Stores four 8 x 8 matrices transposed, in the layout and with the addresses of load_matrices_transposed.
DEVICE void store_matrices_transposed(u32 row, const u32 (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(row), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 to = __shfl_sync(0xffffffffu, row, 8 * i + (lane >> 2));
    store_shared(to + 4 * (lane & 3), transposed(x[i]));
  }
#endif
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. The operands are 8 x 8 matrices in the layout of load_matrices. a has those at
// (row, column) = (0, 0), (8, 0), (0, 8) and (8, 8); b has two, transposed, the upper one first; c has two matrices of
// floats, the upper one first.
template <class Element>
DEVICE void mma(float* c, const u32 (&a)[4], u32 b_lo, u32 b_hi);

template <>
DEVICE void mma<fp16>(float* c, const u32 (&a)[4], u32 b_lo, u32 b_hi) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, "
      "{ %0, %1, %2, %3 };"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_lo), "r"(b_hi));
}

template <>
DEVICE void mma<bf16>(float* c, const u32 (&a)[4], u32 b_lo, u32 b_hi) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, "
      "{ %0, %1, %2, %3 };"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_lo), "r"(b_hi));
}

// Rounds two floats to 16-bit elements, the first in the low half.
template <class Element>
DEVICE u32 pack(float lo, float hi);

template <>
DEVICE u32 pack<fp16>(float lo, float hi) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(lo), "f"(hi));
  return x;
}

template <>
DEVICE u32 pack<bf16>(float lo, float hi) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(lo), "f"(hi));
  return x;
}

// Two 16-bit elements as floats, the low half first.
template <class Element>
DEVICE float2 unpack(u32 x);

template <>
DEVICE float2 unpack<fp16>(u32 x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

template <>
DEVICE float2 unpack<bf16>(u32 x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

// Two fp16 scores as Elements.
template <class Element>
DEVICE u32 as_elements(u32 x);

template <>
DEVICE u32 as_elements<fp16>(u32 x) {
  return x;
}

template <>
DEVICE u32 as_elements<bf16>(u32 x) {
  const float2 scores = unpack<fp16>(x);
  return pack<bf16>(scores.x, scores.y);
}

// 2^x, to about 2 units in the last place.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Waits at barrier `id` for the other threads, `threads` in all.
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Adds x to a sum in global memory.
DEVICE void add_to_global(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// Sets a counter with release semantics: for a CTA that reads it, writes to global memory of this thread, and of
// threads that it met at a barrier, are visible.
DEVICE void store_release(int* to, int x) {
  asm volatile("fence.acq_rel.gpu;\n\tst.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Reads a counter that another CTA sets with store_release. Earlier writes of that CTA are then visible.
DEVICE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
