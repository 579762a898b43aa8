#pragma once

#include "ptx.cuh"
#include "rows.cuh"

constexpr int TILE_HEADS = 16;  // heads of a tile of rows.cuh

// ---- Scores on their way between warps ------------------------------------------------------------------------------
//
// A buffer has 16 keys of ROWS rows of 16 heads. Warps that own heads write scores of 8 rows at a time, and warps that
// own rows read scores of 8 heads at a time. A row of a head is a line of 32 bytes. The two halves of lines 4 to 7 of
// each 8 are exchanged, and heads are 16 bytes further apart than their lines, so that either access takes every bank
// once.
constexpr int LINE_BYTES = 32;

// Address of keys 8 half to 8 half + 7 of a row, in lines that begin with row 0.
DEVICE u32 in_lines(u32 lines, int row, int half) { return lines + row * LINE_BYTES + ((half ^ (row >> 2 & 1)) << 4); }

// Bytes from a head of a buffer to the next.
template <int ROWS>
constexpr int HEAD_BYTES = ROWS * LINE_BYTES + 16;

// The address that a lane passes for a row's scores of all heads, as the left operand of products over heads.
template <int ROWS>
DEVICE u32 row_of_heads(u32 buffer, int row, int lane) {
  return in_lines(buffer + ((lane & 7) + 8 * (lane >> 4)) * HEAD_BYTES<ROWS>, row, lane >> 3 & 1);
}

// ---- Numbers of a row, one for each of 16 heads ---------------------------------------------------------------------
constexpr int NUMBERS = 4 * TILE_HEADS;  // bytes

// The address at which a lane finds the numbers of its 4 heads, in the row.
DEVICE u32 numbers_of(u32 numbers, int row, int lane) { return numbers + row * NUMBERS + 8 * (lane & 3); }

DEVICE void load_numbers(float (&x)[4], u32 at) {
  u32 low[2], high[2];
  load_shared(low, at);
  load_shared(high, at + NUMBERS / 2);
  x[0] = __uint_as_float(low[0]), x[1] = __uint_as_float(low[1]);
  x[2] = __uint_as_float(high[0]), x[3] = __uint_as_float(high[1]);
}

// Eight lanes have the same heads and the same numbers, which one of them stores.
DEVICE void store_numbers(u32 at, const float (&x)[4], int lane) {
  if (lane >= 4) return;
  store_shared(at, __float_as_uint(x[0]), __float_as_uint(x[1]));
  store_shared(at + NUMBERS / 2, __float_as_uint(x[2]), __float_as_uint(x[3]));
}
