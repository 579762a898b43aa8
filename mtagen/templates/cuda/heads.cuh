#pragma once

#include "hopper.cuh"
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
//
// A lane's 4 heads, as in rows.cuh, are neighbours, so that the lane loads them at once.
constexpr int NUMBERS = 4 * TILE_HEADS;  // bytes

// Address of the number of an even head, which the next head's number follows.
DEVICE u32 number_of(u32 numbers, int row, int head) {
  return numbers + row * NUMBERS + 16 * (head % 8 / 2) + 8 * (head / 8);
}

// The address at which a lane finds the numbers of its 4 heads, in the row.
DEVICE u32 numbers_of(u32 numbers, int row, int lane) { return number_of(numbers, row, 2 * (lane & 3)); }

DEVICE void load_numbers(float (&x)[4], u32 at) {
  u32 bits[4];
  load_shared(bits, at);
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = __uint_as_float(bits[n]);
}

// Eight lanes have the same heads and the same numbers, which one of them stores.
DEVICE void store_numbers(u32 at, const float (&x)[4], int lane) {
  if (lane >= 4) return;
  store_shared(at, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

// ---- Arrivals of warps at barriers ----------------------------------------------------------------------------------
//
// One lane arrives for its warp, after __syncwarp. compute-sanitizer's racecheck does not know what __syncwarp orders,
// so it is given kernels compiled with EVERY_LANE_ARRIVES.
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

// Every lane of a warp calls it.
DEVICE void barrier_arrive_as_warp(u32 barrier, int lane) {
  if (WARP_ARRIVALS == 32 || lane == 0) barrier_arrive(barrier);
}
