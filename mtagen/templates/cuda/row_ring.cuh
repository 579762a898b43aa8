#pragma once

#include "ptx.cuh"
#include "strip_visible.cuh"

// ---- A warp's ring of slots, through all rows of a CTA --------------------------------------------------------------

// A warp's blocks of the keys that a row sees: block i begins at key first + i * WARPS * BLOCK_KEYS.
struct WarpBlocks {
  int first = 0, count = 0;

  DEVICE WarpBlocks() {}

  DEVICE WarpBlocks(VisibleKeys seen, int warp) {
    constexpr int STEP = WARPS * BLOCK_KEYS;
    first = seen.start / BLOCK_KEYS * BLOCK_KEYS + warp * BLOCK_KEYS;
    count = max(0, seen.end - first + STEP - 1) / STEP;
  }

  DEVICE int key(int i) const { return first + i * (WARPS * BLOCK_KEYS); }
};

// A CTA works through the blocks of each of its rows twice. The first pass must leave the last DEPTH blocks in the ring
// unchanged, because the second pass, which runs backwards, finds them there; the other blocks are probably in L2. The
// second pass may store results in a block's place. It fills the slots that it frees with the first blocks of the next
// row, so that copies are always in flight.
//
// Block i of a row lies in the slot i * step after slot `start`, modulo DEPTH. The second pass frees the slots of
// blocks DEPTH - 1 to 0 last, in this order, so the next row's first blocks lie in these, and its `step` is the
// opposite.
//
// Work is given as work(key, slot). A row's inputs have its `blocks`, and copy(key, slot) to begin a copy.
struct Ring {
  u32 slots;
  int start = 0, step = 1;

  // Begins to copy the first row's first blocks.
  template <class Inputs>
  DEVICE Ring(u32 slots, const Inputs& row) : slots(slots) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) fetch(row, i, i);
  }

  template <class Inputs, class Work>
  DEVICE void first_pass(const Inputs& row, Work work) const {
    int place = start;
    for (int i = 0; i < row.blocks.count; ++i) {
      work_on(row, i, place, work);
      fetch(row, i + DEPTH, place);
      place = moved(place, step);
    }
  }

  template <class Inputs, class Work>
  DEVICE void second_pass(const Inputs& row, const Inputs& next, Work work) {
    const int last = max(row.blocks.count, DEPTH) - 1;
    int place = (start + step * (last % DEPTH) + DEPTH) % DEPTH;
    for (int i = last; i >= 0; --i) {
      if (i < row.blocks.count) work_on(row, i, place, work);
      if (i >= DEPTH)
        fetch(row, i - DEPTH, place);
      else
        fetch(next, DEPTH - 1 - i, place);
      place = moved(place, -step);
    }
    start = place;
    step = -step;
  }

 private:
  DEVICE static int moved(int place, int step) {
    const int to = place + step;
    return to < 0 ? DEPTH - 1 : to < DEPTH ? to : 0;
  }

  // Each block has a group of copies, an empty one if the row has no such block.
  template <class Inputs>
  DEVICE void fetch(const Inputs& row, int i, int place) const {
    if (i < row.blocks.count) row.copy(row.blocks.key(i), slots + place * SLOT);
    copy_commit();
  }

  // All groups but the last DEPTH - 1 have arrived, and with them the block.
  template <class Inputs, class Work>
  DEVICE void work_on(const Inputs& row, int i, int place, Work work) const {
    copy_wait<DEPTH - 1>();
    __syncwarp();
    work(row.blocks.key(i), slots + place * SLOT);
    __syncwarp();
  }
};
