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

  // What is added in the n-th 8 columns: two of each row.
  DEVICE void load(float (&x)[4], int n) const {
    u32 of_keys[2] = {};
    if (ScoreFunction::ADDS_OF_KEY) load_shared(of_keys, keys + 4 * CHUNK * n);
    float low = common, middle = common, high = common;
    if (ScoreFunction::ADDS_OF_DISTANCE && !uniform) {
      const u32 from = diagonals - 4 * CHUNK * n;
      u32 pair[2];
      load_shared(pair, from);
      low = __uint_as_float(pair[0]), middle = __uint_as_float(pair[1]), high = __uint_as_float(load_shared(from + 8));
    }
    x[0] = rows[0] + middle + __uint_as_float(of_keys[0]);
    x[1] = rows[0] + low + __uint_as_float(of_keys[1]);
    x[2] = rows[1] + high + __uint_as_float(of_keys[0]);
    x[3] = rows[1] + middle + __uint_as_float(of_keys[1]);
  }
};
