// What the device does whatever the kernel: threads and their order, races, copies, barriers, launches.

#include "device.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <random>
#include <string>

uint3 threadIdx, blockIdx, gridDim;

namespace emulator {

Thread threads[MAX_THREADS];
Warp warps[MAX_WARPS];
int count, current;
bool late, ordered;
alignas(1024) unsigned char memory[BASE + MAX_SHARED];
u32 memory_end;
Clocks known[AGENTS];
Products in_flight[MAX_WARPS];

static int active, turn, patience;  // the warp that runs, the lane that goes first, picks until luck turns
static std::mt19937 chance;
static jmp_buf launcher;
static char message[1024];
static void (*body)();

[[noreturn]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = snprintf(message, sizeof(message), "block (%u, %u), thread %d: ", blockIdx.x, blockIdx.y, current);
  vsnprintf(message + length, sizeof(message) - length, format, arguments);
  va_end(arguments);
  _longjmp(launcher, 1);
}

// ---- What orders accesses ---------------------------------------------------------------------------------------

struct Access {
  int agent;
  Clock clock;  // the agent's; NEVER while a copy is on its way
  const char* what;
};
struct Cell {  // two bytes of shared memory
  Access write;
  std::vector<Access> reads;  // since
};
static std::vector<Cell> cells;

static void check(const Access& before, int agent, u32 address, const char* what) {
  if (before.clock > known[agent].at[before.agent])
    fail("%s at shared byte %u races with %s by %s %d", what, address - BASE, before.what,
         before.agent < MAX_THREADS ? "thread" : "warp", before.agent < MAX_THREADS ? before.agent : before.agent - MAX_THREADS);
}

void check_read(int agent, u32 from, int bytes, const char* what) {
  const Access mine{agent, known[agent].at[agent], what};
  for (u32 address = from; address < from + bytes; address += 2) {
    Cell& cell = cells[address / 2];
    check(cell.write, agent, address, what);
    auto same = std::find_if(cell.reads.begin(), cell.reads.end(), [&](const Access& x) { return x.agent == agent; });
    if (same == cell.reads.end())
      cell.reads.push_back(mine);
    else
      *same = mine;
  }
}

void check_write(int agent, u32 to, int bytes, const char* what, bool on_its_way) {
  for (u32 address = to; address < to + bytes; address += 2) {
    Cell& cell = cells[address / 2];
    check(cell.write, agent, address, what);
    for (const Access& read : cell.reads) check(read, agent, address, what);
    cell.reads.clear();
    cell.write = {agent, on_its_way ? NEVER : known[agent].at[agent], what};
  }
}

// ---- Scheduling -------------------------------------------------------------------------------------------------

struct Arrival {  // at an mbarrier, due when copies have landed
  u32 barrier;
  int thread;
  std::vector<Copy> copies;
  Clocks known;
};
static std::vector<Arrival> arrivals;
static void make_arrival(size_t index);

static void choose_warp() {
  if (patience <= 0) {
    warps[active].priority = chance();
    patience = 1 + chance() % 4096;
    if (!arrivals.empty() && !late) make_arrival(chance() % arrivals.size());
  }
  turn = chance() % WARP;
  while (true) {
    int best = -1;
    for (int w = 0; w < count / WARP; ++w)
      if (warps[w].ready && (best < 0 || warps[w].priority > warps[best].priority)) best = w;
    if (best >= 0) {
      active = best;
      return;
    }
    if (arrivals.empty()) break;
    make_arrival(chance() % arrivals.size());
  }
  std::map<std::string, std::string> waiting;
  for (int i = 0; i < count; ++i)
    if (!(warps[i / WARP].done >> i % WARP & 1)) {
      std::string& them = waiting[threads[i].waits_for];
      if (them.size() < 60) them += " " + std::to_string(i);
    }
  if (waiting.empty()) _longjmp(launcher, 2);
  std::string text;
  for (auto& [what, them] : waiting) text += "\n  at " + what + ":" + them;
  fail("deadlock; threads wait%s", text.c_str());
}

static int pick() {
  if (--patience <= 0 || !warps[active].ready) choose_warp();
  const u32 ready = warps[active].ready, rotated = ready >> turn | static_cast<u32>(static_cast<u64>(ready) << (WARP - turn));
  return active * WARP + (__builtin_ctz(rotated) + turn) % WARP;
}

[[noreturn]] static void resume(int thread) {
  current = thread;
  threadIdx.x = thread;
  Thread& next = threads[thread];
  if (next.started) _longjmp(next.context, 1);
  next.started = true;
  setcontext(&next.first);
  __builtin_unreachable();
}

void wait(const char* what) {
  threads[current].waits_for = what;
  warps[current / WARP].ready &= ~(1u << current % WARP);
  const int next = pick();
  if (next != current && !_setjmp(threads[current].context)) resume(next);
}
static void wake(int thread) { warps[thread / WARP].ready |= 1u << thread % WARP; }

static void run_thread() {
  body();
  Warp& warp = warps[current / WARP];
  warp.done |= 1u << current % WARP;
  warp.ready &= ~warp.done;
  resume(pick());
}

// ---- Copies -----------------------------------------------------------------------------------------------------

static void put(const Copy& copy) {
  memcpy(memory + copy.to, copy.from, copy.taken);
  memset(memory + copy.to + copy.taken, 0, copy.bytes - copy.taken);
}
void copy(u32 to, const void* from, int bytes, int taken) {
  place(to, bytes, "copy_async");
  if (taken < 0 || taken > bytes) fail("copy_async of %d of %d bytes", taken, bytes);
  if (taken && reinterpret_cast<size_t>(from) % bytes) fail("copy_async from %p, which is not aligned to %d bytes", from, bytes);
  note_write(current, to, bytes, "copy_async", true);
  const Copy it{to, from, bytes, taken, threads[current].groups};
  if (!late) put(it);
  threads[current].copies.push_back(it);
}
static void land(const Copy& copy, int thread, Clock clock) {
  if (late) put(copy);
  if (ordered)
    for (int i = 0; i < copy.bytes; i += 2) cells[(copy.to + i) / 2].write.clock = clock;
}
void land_until(int end) {
  for (size_t i = arrivals.size(); i--;)
    if (arrivals[i].thread == current) make_arrival(i);
  std::vector<Copy>& copies = threads[current].copies;
  size_t left = 0;
  for (const Copy& copy : copies)
    if (copy.group < end)
      land(copy, current, known[current].at[current]);
    else
      copies[left++] = copy;
  copies.resize(left);
}

// ---- Barriers ---------------------------------------------------------------------------------------------------

struct Barrier {
  int expected = 0;
  std::vector<int> arrived;
  Clocks known;
};
static Barrier barriers[16];

void meet(int id, int expected, const char* what) {
  if (id < 0 || id >= 16 || expected % WARP || expected > count) fail("%s(%d, %d): no such barrier", what, id, expected);
  Barrier& barrier = barriers[id];
  if (!barrier.arrived.empty() && barrier.expected != expected) fail("%s(%d, %d): others expect %d", what, id, expected, barrier.expected);
  if (std::count(barrier.arrived.begin(), barrier.arrived.end(), current)) fail("%s(%d): arrives twice", what, id);
  barrier.expected = expected;
  barrier.arrived.push_back(current);
  release(current, barrier.known);
  if (static_cast<int>(barrier.arrived.size()) == expected) {
    for (int thread : barrier.arrived) acquire(thread, barrier.known), wake(thread);
    barrier = {};
  } else {
    static char names[16][32];
    snprintf(names[id], sizeof(names[id]), "barrier %d", id);
    wait(names[id]);
  }
}

struct MemoryBarrier {
  int expected, left;
  u32 phase;
  std::vector<int> waiting;
  Clocks arrived, known;  // of the phase that runs; of the one before
};
static std::map<u32, MemoryBarrier> memory_barriers;

static MemoryBarrier& memory_barrier(u32 address) {
  auto found = memory_barriers.find(address);
  if (found == memory_barriers.end()) fail("the mbarrier at shared byte %d is not initialised", static_cast<int>(address - BASE));
  return found->second;
}
static void arrive(MemoryBarrier& barrier) {
  if (--barrier.left) return;
  barrier.left = barrier.expected;
  ++barrier.phase;
  barrier.known = barrier.arrived;
  barrier.arrived = {};
  for (int thread : barrier.waiting) wake(thread);
  barrier.waiting.clear();
}
static void make_arrival(size_t index) {
  const int thread = arrivals[index].thread;
  for (size_t i = 0; i <= index; ++i) {  // it waits for all earlier copies of the thread
    if (arrivals[i].thread != thread) continue;
    for (const Copy& copy : arrivals[i].copies) land(copy, thread, arrivals[i].known.at[thread]);
    arrivals[i].copies.clear();
  }
  const Arrival it = std::move(arrivals[index]);
  arrivals.erase(arrivals.begin() + index);
  MemoryBarrier& barrier = memory_barrier(it.barrier);
  barrier.arrived.join(it.known);
  arrive(barrier);
}

}  // namespace emulator

using namespace emulator;

void barrier_init(u32 barrier, int arrivals) {
  place(barrier, 8, "barrier_init");
  if (!memory_barriers.insert({barrier, {arrivals, arrivals}}).second) fail("barrier_init, again");
}

void barrier_arrive(u32 barrier) {
  MemoryBarrier& it = memory_barrier(barrier);
  release(current, it.arrived);
  arrive(it);
}

void barrier_arrive_after_copies(u32 barrier) {
  memory_barrier(barrier);
  arrivals.push_back({barrier, current, std::move(threads[current].copies), known[current]});
  threads[current].copies.clear();
  ++known[current].at[current];
}

void barrier_wait(u32 barrier, int parity) {
  MemoryBarrier& it = memory_barrier(barrier);
  while ((it.phase & 1) == static_cast<u32>(parity)) {
    it.waiting.push_back(current);
    wait("barrier_wait");
  }
  acquire(current, it.known);
}

// ---- Grids ------------------------------------------------------------------------------------------------------

namespace emulator {

static void run_block(char* stacks) {
  memset(memory, 0xff, sizeof(memory));
  for (Barrier& barrier : barriers) barrier = {};
  memory_barriers.clear();
  arrivals.clear();
  for (Products& products : in_flight) products = {};
  if (ordered) {
    cells.assign(memory_end / 2, {});
    for (int i = 0; i < AGENTS; ++i) known[i] = {}, known[i].at[i] = 1;
  }
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    getcontext(&thread.first);
    thread.first.uc_stack.ss_sp = stacks + i * STACK;
    thread.first.uc_stack.ss_size = STACK;
    makecontext(&thread.first, run_thread, 0);
    thread.started = false;
    thread.copies.clear();
    thread.groups = 0;
  }
  for (int w = 0; w < count / WARP; ++w) warps[w] = {~0u, 0, 0, {}, "", static_cast<u32>(chance())};
  patience = 0;
}

const char* launch(void (*thread)(), const u32* grid, int threads_of_block, int shared, u32 seed, bool checked) {
  static char* const stacks = static_cast<char*>(mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (threads_of_block > MAX_THREADS || shared > static_cast<int>(MAX_SHARED)) return "the block is larger than those emulated";
  body = thread;
  count = threads_of_block, memory_end = BASE + shared, late = seed % 2, ordered = checked;
  chance.seed(seed);
  active = turn = 0;  // or the order of warps would depend on what ran before
  gridDim = {grid[0], grid[1], grid[2]};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        run_block(stacks);
        const int outcome = _setjmp(launcher);
        if (!outcome) resume(pick());
        if (outcome == 1) return message;
      }
  return nullptr;
}

}  // namespace emulator
