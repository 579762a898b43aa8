#pragma once

#include "dropout.cuh"

// ---- Which probabilities of a tile dropout keeps: bits in shared memory ---------------------------------------------
//
// A row of the tile has KEPT_ROW bytes. Bit x tells of the key that is x after the first one of the row's first group,
// 8 keys that are drawn together.

// DRAWERS threads draw the bits of ROWS rows of a slot, from row `row` on, of PAIRS pairs of groups each, from group
// `group` on.
template <int ROWS, int PAIRS, int DRAWERS>
DEVICE void draw_kept(u32 to, const Dropout& dropout, u32 slot, int row, int group, int thread) {
  constexpr int SHARERS = DRAWERS > ROWS ? DRAWERS / ROWS : 1;  // of a row
#pragma unroll 1
  for (int r = thread % (DRAWERS / SHARERS); r < ROWS; r += DRAWERS / SHARERS)
#pragma unroll 1
    for (int pair = thread / (DRAWERS / SHARERS); pair < PAIRS; pair += SHARERS)
      store_shared_half(to + r * KEPT_ROW + 2 * pair, dropout.keep_bits(slot, row + r, group + 2 * pair));
}

// What is kept of a thread's fragments: of two rows, CHUNKS chunks of 8 columns, of each of which it has two
// neighbours. Chunks that are ALIGNED are groups.
template <int CHUNKS, bool ALIGNED>
struct Kept {
  static constexpr int WORDS = (CHUNKS + 3) / 4;
  u32 words[2][WORDS];  // of a row; bit 8 n tells of the thread's first column in chunk n, the next bit of its second

  // Reads the bits of the row at `row` and of the next; bit `first` tells of the thread's first column.
  DEVICE Kept(u32 row, int first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 from = row + r * KEPT_ROW + (ALIGNED ? 0 : first / 32 * 4);
      u32 low = load_shared(from);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const u32 high = !ALIGNED || w + 1 < WORDS ? load_shared(from + 4 * w + 4) : 0;
        words[r][w] = ALIGNED ? low >> first : __funnelshift_r(low, high, first);
        low = high;
      }
    }
  }

  // A pair of 16-bit elements of row r and chunk n, with zeros in place of those that are dropped.
  DEVICE u32 pair(u32 x, int r, int n) const {
    const u32 word = words[r][n / 4];
    return x & signs_of_bytes(word << 7, word << 6, 0x4400 + n % 4 * 0x1111);
  }

  // The same of one element, in the thread's column 0 or 1 of the chunk.
  DEVICE float one(float x, int r, int n, int column) const {
    const u32 kept = signs_of_bytes(words[r][n / 4] << (7 - column), 0, n % 4 * 0x1111);
    return __uint_as_float(__float_as_uint(x) & kept);
  }
};
