#pragma once

#include "ptx.cuh"

// ---- Instructions of sm_90a -----------------------------------------------------------------------------------------

constexpr int BARRIER = 8;  // bytes of an mbarrier in shared memory

// Initialises a barrier whose phases end after `arrivals` arrivals.
DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other threads after the next synchronisation.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives with release semantics: earlier writes of this thread are visible to threads that wait.
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when this thread's asynchronous copies are complete.
DEVICE void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of a phase of this parity: 0 for the first, 1 for the second, 0 for the third.
DEVICE void barrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again_%=:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes ordinary writes to shared memory visible to wgmma.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices, held and addressed as load_matrices gives them.
DEVICE void store_matrices(u32 row, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(row), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// Changes the number of registers of each thread of the warpgroup.
template <int REGISTERS>
DEVICE void registers_up_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void registers_down_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Orders this thread's accesses to registers and shared memory before the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the products since the last commit as a group, for wgmma_wait.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until the products of all but the last PENDING groups are complete.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Adds to four sums in global memory.
DEVICE void add_to_global(float* to, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], { %1, %2, %3, %4 };" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// The matrix descriptor of an operand of wgmma in a tile with 128-byte swizzle (bit 62). The stride offset is 1024
// bytes, from 8 rows to the next 8. The leading offset, `panel`, is the number of bytes from a panel to the next. The
// hardware reads it only for M-major and N-major operands.
DEVICE u64 operand(u32 address, int panel = 16) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(panel >> 4) << 16 |
         static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

// Increment of the descriptor of a K-major operand with `rows` rows, to begin at column 16 k. A panel has 64 columns.
DEVICE constexpr u64 inner_columns(int k, int rows) { return ((k >> 2) * (rows * 128) + (k & 3) * 32) >> 4; }

// Increment of the descriptor of an M-major or N-major operand, to begin at row 16 k.
DEVICE constexpr u64 inner_rows(int k) { return (k * 16 * 128) >> 4; }
