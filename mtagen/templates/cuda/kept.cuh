#pragma once

#include "dropout.cuh"

// ---- Which probabilities of a tile dropout keeps: bits in shared memory ---------------------------------------------
//
// A row of the tile has KEPT_ROW bytes. Bit x tells of the key that is x after the first one of the row's first group.

// DRAWERS threads draw the bits of ROWS rows of a slot, from row `row` on, of GROUPS groups each, from group `group`
// on. Two threads share a row. Rounds of the generator that the row has not reached are the same for all rows.
template <int ROWS, int GROUPS, int DRAWERS>
DEVICE void draw_kept(u32 to, const Dropout& dropout, u32 slot, int row, int group, int thread) {
#pragma unroll 2
  for (int n = thread % 2; n < GROUPS; n += 2)
#pragma unroll 2  // a draw is a chain of instructions; two of them overlap
    for (int r = thread / 2; r < ROWS; r += DRAWERS / 2)
      store_shared_half(to + r * KEPT_ROW + 2 * n, dropout.keep_bits(slot, row + r, group + n));
}

// What is kept of a thread's fragments: of two rows, CHUNKS chunks of 8 columns, of each of which it has two
// neighbours. ALIGNED chunks begin with a group.
template <int CHUNKS, bool ALIGNED>
struct Kept {
  static constexpr int WORDS = (CHUNKS + 3) / 4;
  u32 words[2][WORDS][2];  // of a row; bit 8 n + 7 tells of the thread's first column in chunk n, or of its second

  // Reads the bits of the row at `row` and of the next; bit `first` tells of the thread's first column.
  DEVICE Kept(u32 row, int first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 from = row + r * KEPT_ROW + (ALIGNED ? 0 : first / 32 * 4);
      u32 low = load_shared(from);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const u32 high = !ALIGNED || w + 1 < WORDS ? load_shared(from + 4 * w + 4) : 0;
        const u32 bits = ALIGNED ? low : __funnelshift_r(low, high, first);
#pragma unroll
        for (int column = 0; column < 2; ++column) words[r][w][column] = bits << 7 - column - (ALIGNED ? first : 0);
        low = high;
      }
    }
  }

  // A pair of 16-bit elements of row r and chunk n, with zeros in place of those that are dropped.
  DEVICE u32 pair(u32 x, int r, int n) const {
    const u32(&word)[2] = words[r][n / 4];
    return x & signs_of_bytes(word[0], word[1], 0x4400 + n % 4 * 0x1111);
  }

  // The same of one element, in the thread's column 0 or 1 of the chunk.
  DEVICE float one(float x, int r, int n, int column) const {
    const u32 kept = signs_of_bytes(words[r][n / 4][column], 0, n % 4 * 0x1111);
    return __uint_as_float(__float_as_uint(x) & kept);
  }
};
