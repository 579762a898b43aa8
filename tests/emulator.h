// A CUDA device on the CPU, for the emitted sources: their instructions, threads as fibers, CTAs one after the other.
//
// Warps run in a random order, as far ahead of one another as the barriers let them; shared memory starts as NaN; copies
// arrive at once, or as late as they may. So a missing barrier or wait, or a read of what nothing wrote, spoils results.
// Grids run block by block, y slowest: a CTA may wait for those before it.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

using std::max;
using std::min;
using u32 = unsigned int;
using u64 = unsigned long long;
using fp16 = _Float16;
struct bf16 {
  unsigned short bits;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  u32 x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

#define DEVICE inline
#define __global__
#define __restrict__
#define __launch_bounds__(...)

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(u32 x) { return bits<float>(x); }
template <class T>
T __ldg(const T* from) {
  return *from;
}

// ---- Threads -----------------------------------------------------------------------------------------------------

struct Index {
  unsigned x, y;
};
static Index threadIdx, blockIdx, gridDim;

enum State { RUNS, MEETS_WARP, MEETS_CTA, DONE };
struct Copy {
  u32 to;
  uint4 data;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  std::vector<Copy> copies;  // on their way
};
static constexpr size_t STACK = 1 << 17;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static std::function<void()> kernel;

inline void meet(State state) {
  Fiber& self = fibers[current];
  self.state = state;
  swapcontext(&self.context, &scheduler);
}
inline void __syncthreads() { meet(MEETS_CTA); }
inline int thread_index() { return current; }

// Every lane's words: of two exchanges in turn, since no lane is two ahead of another.
struct Words {
  u32 word[6];
};
static std::vector<Words> exchanged[2];
static std::vector<int> turns;
inline const Words* exchange(const Words& mine) {
  auto& words = exchanged[turns[current] ^= 1];
  words[current] = mine;
  meet(MEETS_WARP);
  return &words[current & ~31];
}
inline void __syncwarp() { exchange({}); }
inline float __shfl_xor_sync(u32, float x, int distance) {
  return bits<float>(exchange({{bits<u32>(x)}})[(current & 31) ^ distance].word[0]);
}

// ---- Memory ------------------------------------------------------------------------------------------------------

static std::vector<uint4> shared_words;
static unsigned char* emulated_shared;
static bool late;   // copies arrive when they are waited for
static int faults;  // accesses out of bounds or not aligned

inline unsigned char* place(u32 address, size_t size) {
  if (address % size == 0 && address + size <= shared_words.size() * 16) return emulated_shared + address;
  static uint4 nowhere;
  ++faults;
  return reinterpret_cast<unsigned char*>(&nowhere);
}
inline u32 shared_address(const void*) { return 0; }
template <class T>
void store(u32 to, const T& x) {
  memcpy(place(to, sizeof(x)), &x, sizeof(x));
}
inline void copy_async(u32 to, const void* from, bool valid) {
  Copy copy{to, {}};
  if (valid) memcpy(&copy.data, from, sizeof(copy.data));
  if (!late) return store(to, copy.data);
  store(to, uint4{~0u, ~0u, ~0u, ~0u});
  fibers[current].copies.push_back(copy);
}
inline void copy_wait_all() {
  for (const Copy& copy : fibers[current].copies) store(copy.to, copy.data);
  fibers[current].copies.clear();
}
inline void store_shared(u32 to, u32 x) { store(to, x); }
inline void store_shared(u32 to, u32 x, u32 y, u32 z, u32 w) { store(to, uint4{x, y, z, w}); }
inline u32 load_shared(u32 from) {
  u32 x;
  memcpy(&x, place(from, sizeof(x)), sizeof(x));
  return x;
}
inline void add_to_global(float* to, float x) { *to += x; }
inline int load_acquire(const int* from) { return *from; }
inline void store_release(int* to, int x) { *to = x; }

// ---- Elements and matrices ---------------------------------------------------------------------------------------

template <class Element>
float2 unpack(u32 x);
template <>
inline float2 unpack<fp16>(u32 x) {
  const unsigned short lo = x, hi = x >> 16;
  return {static_cast<float>(bits<fp16>(lo)), static_cast<float>(bits<fp16>(hi))};
}
template <>
inline float2 unpack<bf16>(u32 x) {
  return {bits<float>(x << 16), bits<float>(x & 0xffff0000u)};
}
template <class Element>
u32 half(float x);
template <>
inline u32 half<fp16>(float x) {
  return bits<unsigned short>(static_cast<fp16>(x));
}
template <>
inline u32 half<bf16>(float x) {
  const u32 word = bits<u32>(x);
  return x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
template <class Element>
u32 pack(float lo, float hi) {
  return half<Element>(lo) | half<Element>(hi) << 16;
}
inline float exp2_fast(float x) { return exp2f(x); }
template <class T>
void pin(T&) {}

template <int N>
void load_matrices(u32 (&x)[N], u32 row) {
  const Words* const rows = exchange({{row}});
  const int g = (current & 31) >> 2, t = current & 3;
  for (int m = 0; m < N; ++m) memcpy(&x[m], place(rows[8 * m + g].word[0], 16) + 4 * t, 4);
}
template <int N>
void load_matrices_transposed(u32 (&x)[N], u32 row) {
  const Words* const rows = exchange({{row}});
  const int g = (current & 31) >> 2, t = current & 3;
  for (int m = 0; m < N; ++m) {
    unsigned short pair[2];
    for (int i = 0; i < 2; ++i) memcpy(&pair[i], place(rows[8 * m + 2 * t + i].word[0], 16) + 2 * g, 2);
    memcpy(&x[m], pair, 4);
  }
}
template <class Element>
void mma(float* c, const u32 (&a)[4], u32 b_lo, u32 b_hi) {
  const Words* const lanes = exchange({{a[0], a[1], a[2], a[3], b_lo, b_hi}});
  const int g = (current & 31) >> 2, t = current & 3;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 8; ++k) {  // pairs of the inner axis
      const float2 x = unpack<Element>(lanes[4 * g + k % 4].word[k / 4 * 2 + i / 2]);
      const float2 y = unpack<Element>(lanes[4 * (2 * t + i % 2) + k % 4].word[4 + k / 4]);
      c[i] += x.x * y.x + x.y * y.y;
    }
}

// ---- Grids -------------------------------------------------------------------------------------------------------

inline void run_fiber() {
  kernel();
  meet(DONE);
}

// Runs a block's warps, each some steps at a time, until all its threads are done.
template <class Random>
void run_block(Random& random) {
  const int threads = fibers.size();
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, run_fiber, 0);
    fiber.state = RUNS;
    fiber.copies.clear();
  }
  auto runs = [](const Fiber& fiber) { return fiber.state < MEETS_CTA; };
  while (true) {
    std::vector<int> ready;  // first threads of warps
    for (int first = 0; first < threads; first += 32)
      if (std::any_of(&fibers[first], &fibers[first] + 32, runs)) ready.push_back(first);
    if (ready.empty()) {
      bool done = true;
      for (Fiber& fiber : fibers)
        if (fiber.state == MEETS_CTA) fiber.state = RUNS, done = false;
      if (done) return;
      continue;
    }
    const int first = ready[random() % ready.size()];
    for (int steps = random() % 200 + 1; steps--;)
      for (int i = first; i < first + 32; ++i)
        if (runs(fibers[i])) {
          current = i;
          threadIdx = {static_cast<unsigned>(i), 0};
          swapcontext(&scheduler, &fibers[i].context);
        }
  }
}

// Returns how many accesses were out of bounds or not aligned.
inline int run_grid(int x, int y, int threads, int shared, int seed, std::function<void()> body) {
  std::mt19937 random(seed);
  kernel = body, late = seed % 2, faults = 0;
  gridDim = {static_cast<unsigned>(x), static_cast<unsigned>(y)};
  fibers.clear();
  fibers.resize(threads);
  for (Fiber& fiber : fibers) fiber.stack.reset(new char[STACK]);
  for (auto& words : exchanged) words.resize(threads);
  turns.assign(threads, 0);
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      shared_words.assign(shared / 16, uint4{~0u, ~0u, ~0u, ~0u});
      emulated_shared = reinterpret_cast<unsigned char*>(shared_words.data());
      run_block(random);
    }
  return faults;
}
