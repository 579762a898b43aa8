#pragma once

#include "dropout.cuh"

// ---- Dropout mask of a tile of probabilities: bits in shared memory -------------------------------------------------
//
// A row of the tile has DROPOUT_ROW bytes. Bit x is set if key x, counted from the row's first group, is kept.

// DRAWERS threads draw the bits of ROWS rows of a slot from row `row` on, and of GROUPS groups from group `group` on.
// Two threads share a row. The compiler computes rounds of the generator that the row has not reached once for all
// rows.
template <int ROWS, int GROUPS, int DRAWERS>
DEVICE void draw_dropout_bits(u32 to, const Dropout& dropout, u32 slot, int row, int group, int thread) {
#pragma unroll 2
  for (int n = thread % 2; n < GROUPS; n += 2)
#pragma unroll 2  // a draw is a chain of dependent instructions, so two draws overlap
    for (int r = thread / 2; r < ROWS; r += DRAWERS / 2)
      store_shared_half(to + r * DROPOUT_ROW + 2 * n, dropout.keep_bits(slot, row + r, group + n));
}

// The dropout mask of a thread's fragments: two rows of CHUNKS chunks of 8 columns, of which the thread has two
// neighbouring columns each. ALIGNED: chunks begin with a group.
template <int CHUNKS, bool ALIGNED>
struct DropoutMask {
  static constexpr int WORDS = (CHUNKS + 3) / 4;
  u32 words[2][WORDS][2];  // per row; bit 8 n + 7 is that of the thread's first or second column in chunk n

  // Reads the bits of the row at `row` and of the next row; bit `first` is that of the thread's first column.
  DEVICE DropoutMask(u32 row, int first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 from = row + r * DROPOUT_ROW + (ALIGNED ? 0 : first / 32 * 4);
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

  // A pair of 16-bit elements of row r and chunk n, with zeros instead of dropped elements.
  DEVICE u32 pair(u32 x, int r, int n) const {
    const u32(&word)[2] = words[r][n / 4];
    return x & signs_of_bytes(word[0], word[1], 0x4400 + n % 4 * 0x1111);
  }

  // x, or 0 if it is dropped, for the thread's column 0 or 1 of chunk n.
  DEVICE float element(float x, int r, int n, int column) const {
    const u32 keep = signs_of_bytes(words[r][n / 4][column], 0, n % 4 * 0x1111);
    return __uint_as_float(__float_as_uint(x) & keep);
  }
};
