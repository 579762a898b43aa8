#pragma once

#include "ptx.cuh"

// ---- What places add to scores --------------------------------------------------------------------------------------

// Bytes of shared memory of a warp whose tile has COLUMNS columns.
DEVICE constexpr int place_bytes(int columns) { return 4 * (2 * columns + 16); }

// What places add to the exponents of a warp's 16 rows and COLUMNS columns. The warp computes it once for each key and
// for each diagonal of its tile, and keeps it in shared memory.
template <int COLUMNS>
struct PlaceTerms {
  static constexpr int DIAGONALS = 16 + COLUMNS - 1;
  u32 keys, diagonals;  // addresses of the thread's first column, and of the diagonal below its first score's
  float rows[2];        // of its rows
  bool uniform = true;  // whether all diagonals have the same
  float common = 0.f;   // then this is it

  // The warp's first row lies at `position`, and its first column is key `key`.
  DEVICE PlaceTerms(u32 shared, const ScoreFunction& function, int position, int key, int lane) {
    const int lane_row = lane >> 2, lane_pair = lane & 3;
    keys = shared + 8 * lane_pair;
    diagonals = shared + 4 * (COLUMNS + COLUMNS - 2 + 2 * lane_row - 2 * lane_pair);
    __syncwarp();  // the terms of the tile before have been read
    if (ScoreFunction::ADDS_OF_KEY) {
#pragma unroll
      for (int i = 0; i < COLUMNS; i += 32)
        if (i + lane < COLUMNS) store_shared(shared + 4 * (i + lane), __float_as_uint(function.of_key(key + i + lane)));
    }
    if (ScoreFunction::ADDS_OF_DISTANCE) {
      bool equal = true;
#pragma unroll
      for (int i = 0; i < DIAGONALS; i += 32) {
        const int diagonal = min(i + lane, DIAGONALS - 1);  // from the last column of the first row on
        const int distance = position - key - (COLUMNS - 1) + diagonal;
        const float x = function.of_distance(distance, 0, static_cast<float>(distance));
        if (i == 0) common = __shfl_sync(~0u, x, 0);
        equal = equal && x == common;
        if (i + lane < DIAGONALS) store_shared(shared + 4 * (COLUMNS + diagonal), __float_as_uint(x));
      }
      uniform = !__any_sync(~0u, !equal);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = function.of_position(position + 2 * lane_row + r);
    __syncwarp();
  }

  // The thread's `levels` of its rows plus what keys and distances add in the n-th 8 columns, two of each row.
  DEVICE void add(float (&x)[4], int n, const float (&levels)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = levels[i >> 1];
    if (ScoreFunction::ADDS_OF_KEY) {
      const float2 pair = load_floats(keys + 4 * CHUNK * n);
      x[0] += pair.x, x[1] += pair.y;
      x[2] += pair.x, x[3] += pair.y;
    }
    if (ScoreFunction::ADDS_OF_DISTANCE) {
      float2 below = make_float2(common, common);
      float above = common;
      if (!uniform) {
        const u32 from = diagonals - 4 * CHUNK * n;
        below = load_floats(from), above = __uint_as_float(load_shared(from + 8));
      }
      x[0] += below.y, x[1] += below.x;
      x[2] += above, x[3] += below.y;
    }
  }

  static DEVICE float2 load_floats(u32 from) {
    u32 x[2];
    load_shared(x, from);
    return make_float2(__uint_as_float(x[0]), __uint_as_float(x[1]));
  }
};
