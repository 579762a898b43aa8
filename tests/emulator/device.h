// A CUDA device on the CPU, for the emitted sources: what they use of CUDA, and their functions of inline PTX.
//
// Threads are fibers, and CTAs run one after the other, x fastest: a CTA may wait for those before it. A warp runs until it must
// wait, or until its luck turns: warps have priorities, drawn anew at random times, so that some fall as far behind as the
// barriers let them. Shared memory starts as NaNs. Copies land, and wgmma reads, either at once or as late as they may; until a
// wait, what wgmma makes is NaN. So a missing barrier or wait, or a read of what nothing wrote, spoils results.
//
// Besides, every access to shared memory through an instruction may be checked against those before it: a pair that no barrier
// orders is an error, even if this time it did no harm.
//
// Here is what kernels are compiled with; device.cpp is a library that all of them share.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

using std::max;
using std::min;
using std::signbit;
using u32 = unsigned int;
using u64 = unsigned long long;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct uint3 {
  u32 x, y, z;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline u32 __umulhi(u32 x, u32 y) { return static_cast<u64>(x) * y >> 32; }
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return (low | static_cast<u64>(high) << 32) >> (shift & 31); }
inline u64 multiply_wide(u32 x, u32 y) { return static_cast<u64>(x) * y; }
inline u32 signs_of_bytes(u32 x, u32 y, u32 bytes) {
  const u64 both = x | static_cast<u64>(y) << 32;
  u32 signs = 0;
  for (int i = 0; i < 4; ++i)
    if (both >> 8 * (bytes >> 4 * i & 7) >> 7 & 1) signs |= 255u << 8 * i;
  return signs;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}

// ---- Elements ----------------------------------------------------------------------------------------------------

struct __half {
  unsigned short bits;
  __half() = default;
  explicit __half(float x) : bits(bits_as<unsigned short>(static_cast<_Float16>(x))) {}
  explicit operator float() const { return bits_as<_Float16>(bits); }
};
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 x) { return {static_cast<float>(x.x), static_cast<float>(x.y)}; }

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const u32 word = bits_as<u32>(x);
    bits = x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fff;
  }
  explicit operator float() const { return bits_as<float>(static_cast<u32>(bits) << 16); }
};

template <class Element>
u32 pack(float lo, float hi) {
  return Element(lo).bits | static_cast<u32>(Element(hi).bits) << 16;
}
template <class Element>
float half_of(u32 word, int high) {
  Element x;
  x.bits = word >> 16 * high;
  return static_cast<float>(x);
}
inline float exp2_fast(float x) {  // numbers below the smallest normal one become 0, as by the instruction
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.f : y;
}
inline float tanh_fast(float x) {  // rounded to 11 bits: errs by 2^-11 like the instruction
  const u32 word = bits_as<u32>(tanhf(x));
  return bits_as<float>((word + (1u << 12)) & ~0u << 13);
}
inline float __fdividef(float a, float b) { return a / b; }

extern uint3 threadIdx, blockIdx, gridDim;

namespace emulator {

constexpr float NOTHING = NAN;
constexpr int WARP = 32, MAX_THREADS = 640, MAX_WARPS = MAX_THREADS / WARP, AGENTS = MAX_THREADS + MAX_WARPS;
constexpr size_t STACK = 256 << 10;
constexpr u32 BASE = 1024, MAX_SHARED = 228 << 10;  // shared memory starts with what the system takes

// ---- One launch --------------------------------------------------------------------------------------------------

struct Copy {
  u32 to;
  const void* from;
  int bytes, taken;  // zeros in place of those that are not taken
  int group;
};

struct Thread {
  jmp_buf context;
  ucontext_t first;
  bool started;
  const char* waits_for;
  std::vector<Copy> copies;  // on their way
  int groups;                // of copies, committed
};

struct Warp {
  u32 ready, done, arrived;  // a bit a lane
  void* given[WARP];         // by the lanes that have arrived at an instruction of all
  const char* what;
  u32 priority;
};

extern Thread threads[MAX_THREADS];
extern Warp warps[MAX_WARPS];
extern int count, current;  // threads; the one that runs
extern bool late;           // copies and products come as late as they may
extern unsigned char memory[BASE + MAX_SHARED];
extern u32 memory_end;

[[noreturn]] void fail(const char* format, ...);

// ---- What orders accesses: vector clocks -------------------------------------------------------------------------
//
// Agents are the threads, and for each warp its products in flight.

using Clock = u32;
constexpr Clock NEVER = ~0u;

struct Clocks {
  Clock at[AGENTS] = {};
  void join(const Clocks& other) {
    for (int i = 0; i < AGENTS; ++i) at[i] = max(at[i], other.at[i]);
  }
};
extern bool ordered;  // whether accesses are checked
extern Clocks known[AGENTS];

inline void release(int agent, Clocks& to) {
  if (!ordered) return;
  to.join(known[agent]);
  ++known[agent].at[agent];
}
inline void acquire(int agent, const Clocks& from) {
  if (ordered) known[agent].join(from);
}

void check_read(int agent, u32 from, int bytes, const char* what);
void check_write(int agent, u32 to, int bytes, const char* what, bool on_its_way);
inline void note_read(int agent, u32 from, int bytes, const char* what) {
  if (ordered) check_read(agent, from, bytes, what);
}
inline void note_write(int agent, u32 to, int bytes, const char* what, bool on_its_way = false) {
  if (ordered) check_write(agent, to, bytes, what, on_its_way);
}

// ---- Warps -------------------------------------------------------------------------------------------------------

void wait(const char* what);

// All lanes meet; the last one to arrive does run(what every lane gave) for all.
template <class Given, class Run>
void together(const char* what, Given& mine, Run run) {
  Warp& warp = warps[current / WARP];
  if (!warp.arrived)
    warp.what = what;
  else if (strcmp(warp.what, what))
    fail("is at %s while other lanes of its warp are at %s", what, warp.what);
  warp.given[current % WARP] = &mine;
  warp.arrived |= 1u << current % WARP;
  if (warp.arrived != ~0u) return wait(what);
  run(reinterpret_cast<Given* const*>(warp.given));
  warp.arrived = 0;
  warp.ready = ~0u;
}

}  // namespace emulator

inline void __syncwarp() {
  using namespace emulator;
  int nothing;
  together("__syncwarp", nothing, [](auto) {
    if (!ordered) return;
    const int first = current / WARP * WARP;
    Clocks all;
    for (int i = first; i < first + WARP; ++i) release(i, all);
    for (int i = first; i < first + WARP; ++i) acquire(i, all);
  });
}
template <class T>
T __shfl_sync(u32, T x, int lane) {
  struct {
    T x, result;
    int lane;
  } mine{x, x, lane};
  emulator::together("__shfl_sync", mine, [](auto all) {
    for (int i = 0; i < 32; ++i) all[i]->result = all[all[i]->lane & 31]->x;
  });
  return mine.result;
}
template <class T>
T __shfl_xor_sync(u32, T x, int distance) {
  return __shfl_sync(~0u, x, emulator::current % 32 ^ distance);
}
inline bool __any_sync(u32, bool x) {
  emulator::together("__any_sync", x, [](auto all) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= *all[i];
    for (int i = 0; i < 32; ++i) *all[i] = any;
  });
  return x;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs(static_cast<int>(x)); }
inline u32 __ballot_sync(u32, bool x) {
  u32 mine = x;
  emulator::together("__ballot_sync", mine, [](auto all) {
    u32 ballot = 0;
    for (int i = 0; i < 32; ++i) ballot |= *all[i] << i;
    for (int i = 0; i < 32; ++i) *all[i] = ballot;
  });
  return mine;
}
inline u32 __match_any_sync(u32, int x) {
  struct {
    int x;
    u32 peers;
  } mine{x, 0};
  emulator::together("__match_any_sync", mine, [](auto all) {
    for (int i = 0; i < 32; ++i)
      for (int l = 0; l < 32; ++l) all[i]->peers |= u32{all[l]->x == all[i]->x} << l;
  });
  return mine.peers;
}

inline int __reduce_min_sync(u32, int x) {
  emulator::together("__reduce_min_sync", x, [](auto all) {
    int least = *all[0];
    for (int i = 1; i < 32; ++i) least = std::min(least, *all[i]);
    for (int i = 0; i < 32; ++i) *all[i] = least;
  });
  return x;
}
inline int __reduce_max_sync(u32, int x) { return -__reduce_min_sync(~0u, -x); }

// ---- Shared memory -----------------------------------------------------------------------------------------------

namespace emulator {

inline unsigned char* place(u32 address, u32 bytes, const char* what) {
  if (address % bytes) fail("%s at shared byte %d is not aligned to %u bytes", what, static_cast<int>(address - BASE), bytes);
  if (address < BASE || address + bytes > memory_end) fail("%s at shared byte %d is out of bounds", what, static_cast<int>(address - BASE));
  return memory + address;
}
template <class T>
T load(u32 from) {
  T x;
  memcpy(&x, place(from, sizeof(x), "load_shared"), sizeof(x));
  note_read(current, from, sizeof(x), "load_shared");
  return x;
}
template <class T>
void store(u32 to, T x) {
  memcpy(place(to, sizeof(x), "store_shared"), &x, sizeof(x));
  note_write(current, to, sizeof(x), "store_shared");
}

// Copies. Their order is that of the wait, even if they land at once.
void copy(u32 to, const void* from, int bytes, int taken);
void land_until(int end);  // of this thread: those of groups before `end`

}  // namespace emulator

inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const unsigned char*>(p) - emulator::memory; }
inline void copy_async(u32 to, const void* from, bool valid) { emulator::copy(to, from, 16, valid ? 16 : 0); }
inline void copy_part_async(u32 to, const void* from, int bytes) { emulator::copy(to, from, 16, bytes); }
inline void copy_async_stream(u32 to, const void* from, bool valid) { copy_async(to, from, valid); }
inline void copy_word_async(u32 to, const void* from) { emulator::copy(to, from, 4, 4); }
inline void copy_commit() { ++emulator::threads[emulator::current].groups; }
inline void copy_wait_all() { emulator::land_until(1 << 30); }
template <int PENDING>
void copy_wait() {
  emulator::land_until(emulator::threads[emulator::current].groups - PENDING);
}

inline void store_shared(u32 to, u32 x) { emulator::store(to, x); }
inline void store_shared(u32 to, u32 x, u32 y) { emulator::store(to, x | static_cast<u64>(y) << 32); }
inline void store_shared(u32 to, u32 x, u32 y, u32 z, u32 w) { emulator::store(to, uint4{x, y, z, w}); }
inline void store_shared_half(u32 to, u32 x) { emulator::store(to, static_cast<unsigned short>(x)); }
inline void store_shared_halves(u32 to, u32 to_high, u32 x) {
  emulator::store(to, static_cast<unsigned short>(x));
  emulator::store(to_high, static_cast<unsigned short>(x >> 16));
}
inline u32 load_shared(u32 from) { return emulator::load<u32>(from); }
inline void load_shared(u32 (&x)[2], u32 from) {
  const u64 words = emulator::load<u64>(from);
  x[0] = words, x[1] = words >> 32;
}
inline void load_shared(u32 (&x)[4], u32 from) {
  const uint4 words = emulator::load<uint4>(from);
  x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
}

inline void store_global(void* to, u32 x, u32 y, u32 z, u32 w) {
  if (reinterpret_cast<size_t>(to) % 16) emulator::fail("store_global at %p, which is not aligned to 16 bytes", to);
  const uint4 words{x, y, z, w};
  memcpy(to, &words, sizeof(words));
}

// Global memory that other CTAs use too.
inline void add_to_global(float* to, float x) { *to += x; }
inline void add_to_global(float* to, float x, float y, float z, float w) {
  if (reinterpret_cast<size_t>(to) % 16) emulator::fail("add_to_global at %p, which is not aligned to 16 bytes", to);
  to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}
inline void store_release(int* to, int x) { *to = x; }
inline int load_acquire(const int* from) {
  static const int* last;
  static int times;
  times = from == last ? times + 1 : 0;
  last = from;
  if (times > 1000000) emulator::fail("waits forever for a CTA after it");
  return *from;
}

inline void schedule_fence(int x) {
  if (x < 0) emulator::fail("schedule_fence would end the thread");
}
inline int thread_index() { return emulator::current; }
template <int N>
void mark_defined(float (&x)[N]) {
  for (float& each : x) each = NAN;
}
template <class T>
void pin(T&) {}
template <class T>
const T* anew(const T* from) {
  return from;
}
inline int unrelated(int x) { return x; }

// ---- Barriers ----------------------------------------------------------------------------------------------------

namespace emulator {

void meet(int id, int expected, const char* what);

}  // namespace emulator

inline void __syncthreads() { emulator::meet(0, emulator::count, "__syncthreads"); }
inline void named_barrier(int id, int threads) { emulator::meet(id, threads, "named_barrier"); }

void barrier_init(u32 barrier, int arrivals);
inline void barrier_init_fence() {}
void barrier_arrive(u32 barrier);
void barrier_arrive_after_copies(u32 barrier);
void barrier_wait(u32 barrier, int parity);
inline void fence_async() {}
template <int REGISTERS>
void registers_up_to() {}
template <int REGISTERS>
void registers_down_to() {}

// ---- Tensor cores ------------------------------------------------------------------------------------------------

namespace emulator {

// Of an 8 x 8 matrix, the two elements that a lane holds.
inline u32 pair_of(const unsigned short (&element)[8][8], int lane, bool transposed) {
  const int g = lane >> 2, t = lane & 3;
  return transposed ? element[2 * t][g] | element[2 * t + 1][g] << 16 : element[g][2 * t] | element[g][2 * t + 1] << 16;
}
inline void set_pair(unsigned short (&element)[8][8], int lane, bool transposed, u32 pair) {
  const int g = lane >> 2, t = lane & 3;
  (transposed ? element[2 * t][g] : element[g][2 * t]) = pair;
  (transposed ? element[2 * t + 1][g] : element[g][2 * t + 1]) = pair >> 16;
}

template <int N, bool TRANSPOSED>
void load_matrices(u32 (&x)[N], u32 row) {
  struct {
    u32* x;
    u32 row;
  } mine{x, row};
  const char* const what = TRANSPOSED ? "load_matrices_transposed" : "load_matrices";
  together(what, mine, [what](auto all) {
    for (int m = 0; m < N; ++m) {
      unsigned short element[8][8];
      for (int i = 0; i < 8; ++i) {
        const u32 from = all[8 * m + i]->row;
        memcpy(element[i], place(from, 16, what), 16);
        note_read(current / WARP * WARP + 8 * m + i, from, 16, what);
      }
      for (int i = 0; i < WARP; ++i) all[i]->x[m] = pair_of(element, i, TRANSPOSED);
    }
  });
}

// Rows g and g + 8 of a[16 x 16], as every lane has them.
template <class Element>
void gather_a(float (&a)[16][16], int lane, const u32* words) {
  for (int i = 0; i < 4; ++i)
    for (int high = 0; high < 2; ++high) a[(lane >> 2) + 8 * (i & 1)][2 * (lane & 3) + 8 * (i >> 1) + high] = half_of<Element>(words[i], high);
}

// Products of a warp in flight: sums by lane, those of its registers.
struct Sums {
  float* d[WARP];
  std::vector<float> values[WARP];
  int group;  // the last that adds to them
};
struct Product {
  std::function<void()> run;
  int group;
  Clock clock;
};
struct Products {
  std::vector<Product> products;
  std::map<float*, Sums> sums;  // by lane 0's registers
  int groups = 0;
  bool fenced = false;
};
extern Products in_flight[MAX_WARPS];

// An operand in shared memory, of which its descriptor tells: element `inner` of row or column `outer`.
template <class Element, bool TRANSPOSED>
float operand_element(u64 descriptor, int outer, int inner, int agent, bool look_only = false) {
  const u32 start = (descriptor & 0x3fff) << 4, panel = (descriptor >> 16 & 0x3fff) << 4, rows = (descriptor >> 32 & 0x3fff) << 4;
  u32 at = TRANSPOSED ? start + outer / 64 * panel + inner / 8 * rows + inner % 8 * 128 + outer % 64 * 2
                      : start + outer / 8 * rows + outer % 8 * 128 + inner * 2;
  at ^= (at >> 7 & 7) << 4;
  Element x;
  memcpy(&x, place(at, 2, "wgmma"), 2);
  if (agent >= 0) note_read(agent, at, 2, "wgmma");
  return static_cast<float>(x);
}

// d[64 x N] (+)= a[64 x 16] b[16 x N], of which a warp makes 16 rows.
template <class Element, int N, bool A_IN_REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED>
void wgmma(float (&d)[N / 2], const u32* a, u64 a_operand, u64 b_operand, bool accumulate) {
  struct Given {
    float* d;
    const u32* a;
    u64 a_operand, b_operand;
    bool accumulate;
  } mine{d, a, a_operand, b_operand, accumulate};
  together("wgmma", mine, [](Given* const* all) {
    const int warp = current / WARP, agent = MAX_THREADS + warp;
    const Given first = *all[0];
    Products& products = in_flight[warp];
    if (!products.fenced) fail("wgmma without wgmma_fence since the last group");
    struct Registers {
      float a[16][16];
    } registers;
    for (int i = 0; i < WARP; ++i) {
      const Given& x = *all[i];
      if (x.a_operand != first.a_operand || x.b_operand != first.b_operand || x.accumulate != first.accumulate) fail("wgmma: operands differ from lane to lane");
      if (A_IN_REGISTERS) gather_a<Element>(registers.a, i, x.a);
      if (ordered) known[agent].join(known[warp * WARP + i]);
    }
    for (u64 operand : {A_IN_REGISTERS ? first.b_operand : first.a_operand, first.b_operand})
      if (operand >> 62 != 1 || (operand >> 49 & 7)) fail("wgmma: not a descriptor of a 128-byte swizzle");
    auto inserted = products.sums.insert({first.d, {}});
    Sums& sums = inserted.first->second;
    sums.group = products.groups;
    for (int i = 0; i < WARP; ++i) {
      if (!inserted.second && sums.d[i] != all[i]->d) fail("wgmma: registers of other sums in flight");
      sums.d[i] = all[i]->d;
      if (inserted.second) sums.values[i].assign(sums.d[i], sums.d[i] + N / 2);
      std::fill_n(sums.d[i], N / 2, NOTHING);
    }
    if (ordered) {
      ++known[agent].at[agent];
      for (int k = 0; k < 16; ++k) {
        if (!A_IN_REGISTERS)
          for (int r = 0; r < 16; ++r) operand_element<Element, A_TRANSPOSED>(first.a_operand, warp % 4 * 16 + r, k, agent);
        for (int n = 0; n < N; ++n) operand_element<Element, B_TRANSPOSED>(first.b_operand, n, k, agent);
      }
    }
    auto run = [registers, first, warp, &sums] {
      float a[16][16], b[16][N], c[16][N];
      for (int i = 0; i < WARP; ++i)
        for (int x = 0; x < N / 2; ++x) c[(i >> 2) + 8 * (x >> 1 & 1)][(x >> 2) * 8 + 2 * (i & 3) + (x & 1)] = first.accumulate ? sums.values[i][x] : 0.f;
      for (int k = 0; k < 16; ++k) {
        for (int r = 0; r < 16; ++r) a[r][k] = A_IN_REGISTERS ? registers.a[r][k] : operand_element<Element, A_TRANSPOSED>(first.a_operand, warp % 4 * 16 + r, k, -1);
        for (int n = 0; n < N; ++n) b[k][n] = operand_element<Element, B_TRANSPOSED>(first.b_operand, n, k, -1);
      }
      for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 16; ++k)
          for (int n = 0; n < N; ++n) c[r][n] += a[r][k] * b[k][n];
      for (int i = 0; i < WARP; ++i)
        for (int x = 0; x < N / 2; ++x) sums.values[i][x] = c[(i >> 2) + 8 * (x >> 1 & 1)][(x >> 2) * 8 + 2 * (i & 3) + (x & 1)];
    };
    if (!late) run();
    products.products.push_back({late ? std::function<void()>(run) : [] {}, products.groups, known[agent].at[agent]});
  });
}

}  // namespace emulator

template <int N>
void load_matrices(u32 (&x)[N], u32 row) {
  emulator::load_matrices<N, false>(x, row);
}
template <int N>
void load_matrices_transposed(u32 (&x)[N], u32 row) {
  emulator::load_matrices<N, true>(x, row);
}
namespace emulator {
template <bool TRANSPOSED>
void store_matrices(u32 row, const u32 (&x)[4]) {
  struct {
    const u32* x;
    u32 row;
  } mine{x, row};
  const char* const what = TRANSPOSED ? "store_matrices_transposed" : "store_matrices";
  together(what, mine, [what](auto all) {
    for (int m = 0; m < 4; ++m) {
      unsigned short element[8][8];
      for (int i = 0; i < WARP; ++i) set_pair(element, i, TRANSPOSED, all[i]->x[m]);
      for (int i = 0; i < 8; ++i) {
        const u32 to = all[8 * m + i]->row;
        memcpy(place(to, 16, what), element[i], 16);
        note_write(current / WARP * WARP + 8 * m + i, to, 16, what);
      }
    }
  });
}
}  // namespace emulator

inline void store_matrices(u32 row, const u32 (&x)[4]) { emulator::store_matrices<false>(row, x); }
inline void store_matrices_transposed(u32 row, const u32 (&x)[4]) { emulator::store_matrices<true>(row, x); }
inline u32 transposed(u32 x) {
  emulator::together("transposed", x, [](auto all) {
    unsigned short element[8][8];
    for (int i = 0; i < 32; ++i) emulator::set_pair(element, i, false, *all[i]);
    for (int i = 0; i < 32; ++i) *all[i] = emulator::pair_of(element, i, true);
  });
  return x;
}

template <class Element>
void mma(float* c, const u32 (&a)[4], u32 b_lo, u32 b_hi) {
  struct {
    float* c;
    const u32* a;
    u32 b[2];
  } mine{c, a, {b_lo, b_hi}};
  emulator::together("mma", mine, [](auto all) {
    float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < 32; ++i) {
      const int g = i >> 2, t = i & 3;
      emulator::gather_a<Element>(a, i, all[i]->a);
      for (int k = 0; k < 4; ++k) b[2 * t + 8 * (k >> 1) + (k & 1)][g] = half_of<Element>(all[i]->b[k >> 1], k & 1);
      for (int x = 0; x < 4; ++x) c[g + 8 * (x >> 1)][2 * t + (x & 1)] = all[i]->c[x];
    }
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) c[r][n] += a[r][k] * b[k][n];
    for (int i = 0; i < 32; ++i)
      for (int x = 0; x < 4; ++x) all[i]->c[x] = c[(i >> 2) + 8 * (x >> 1)][2 * (i & 3) + (x & 1)];
  });
}

inline void wgmma_fence() { emulator::in_flight[emulator::current / 32].fenced = true; }
inline void wgmma_commit() {
  int nothing;
  emulator::together("wgmma_commit", nothing, [](auto) {
    emulator::Products& products = emulator::in_flight[emulator::current / 32];
    ++products.groups;
    products.fenced = false;
  });
}
template <int PENDING>
void wgmma_wait() {
  using namespace emulator;
  int nothing;
  together("wgmma_wait", nothing, [](auto) {
    const int warp = current / WARP, agent = MAX_THREADS + warp;
    Products& it = in_flight[warp];
    const int end = it.groups - PENDING;
    size_t left = 0;
    for (Product& product : it.products)
      if (product.group < end) {
        product.run();
        for (int i = 0; i < WARP; ++i) known[warp * WARP + i].at[agent] = product.clock;
      } else {
        std::swap(it.products[left++], product);
      }
    it.products.resize(left);
    for (auto sums = it.sums.begin(); sums != it.sums.end();)
      if (sums->second.group < end) {
        for (int i = 0; i < WARP; ++i) std::copy(sums->second.values[i].begin(), sums->second.values[i].end(), sums->second.d[i]);
        sums = it.sums.erase(sums);
      } else {
        ++sums;
      }
  });
}

// ---- Grids -------------------------------------------------------------------------------------------------------

namespace emulator {

// Why a launch has failed, or null.
const char* launch(void (*thread)(), const u32* grid, int threads_of_block, int shared, u32 seed, bool checked);

// What each thread of a kernel does.
inline void** arguments;
template <auto KERNEL>
struct Body;
template <class... Parameters, void (*KERNEL)(Parameters...)>
struct Body<KERNEL> {
  template <size_t... INDEX>
  static void call(std::index_sequence<INDEX...>) {
    KERNEL(*static_cast<std::remove_const_t<Parameters>*>(arguments[INDEX])...);
  }
  static void run() { call(std::index_sequence_for<Parameters...>()); }
};

}  // namespace emulator

#define EMULATED_KERNEL(NAME, THREADS_OF_BLOCK, SHARED)                                                  \
  extern "C" const char* launch_##NAME(const u32* grid, u32 seed, bool checked, void** arguments) {      \
    emulator::arguments = arguments;                                                                     \
    return emulator::launch(emulator::Body<NAME>::run, grid, THREADS_OF_BLOCK, SHARED, seed, checked); \
  }
