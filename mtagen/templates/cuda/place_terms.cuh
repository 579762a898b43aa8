#pragma once

#include "ptx.cuh"

// ---- What places add to scores --------------------------------------------------------------------------------------
//
// A term is computed once for each key of a tile, for all warps, and once for each diagonal of a warp's tile. Terms lie
// in shared memory, in units of exponents of 2.

// Terms of 16 keys lie in the order in which a warp's lanes take them: those of a lane's columns, two of each 8
// columns, are neighbours, so that one load takes them.
DEVICE int place_of_column(int column) {
  return (column & ~15) + 4 * (column >> 1 & 3) + 2 * (column >> 3 & 1) + (column & 1);
}

// Thread `thread` of THREADS stores what COLUMNS keys from `key` on add.
template <int COLUMNS, int THREADS>
DEVICE void store_key_terms(u32 to, const ScoreFunction& function, int key, int thread) {
#pragma unroll
  for (int i = 0; i < COLUMNS; i += THREADS) {
    const int column = i + thread;
    if (column < COLUMNS)
      store_shared(to + 4 * place_of_column(column), __float_as_uint(function.of_key(key + column)));
  }
}

// Bytes of the diagonals of a warp whose tile has COLUMNS columns.
DEVICE constexpr int diagonal_bytes(int columns) { return 4 * (columns + 16); }

// Whether all diagonals of a warp's rows from `position` on and COLUMNS keys from `key` on add the same.
template <int COLUMNS>
DEVICE bool add_the_same(int position, int key) {
  return position - key - (COLUMNS - 1) >= ScoreFunction::SAME_FROM;
}

// The lanes of a warp store term(n) of each diagonal n of its 16 rows and COLUMNS keys. Diagonal 0 has the first row
// and the last key.
template <int COLUMNS, class Term>
DEVICE void store_diagonals(u32 to, int lane, Term term) {
  constexpr int DIAGONALS = 16 + COLUMNS - 1;
#pragma unroll
  for (int i = 0; i < DIAGONALS; i += 32) {
    const int n = i + lane;
    const float x = term(n);
    if (n < DIAGONALS) store_shared(to + 4 * n, __float_as_uint(x));
  }
}

// A warp stores what the diagonals of its 16 rows from `position` on and COLUMNS keys from `key` on add.
template <int COLUMNS>
DEVICE void store_diagonal_terms(u32 to, const ScoreFunction& function, int position, int key, int lane) {
  auto term_of = [&](int distance) { return function.of_distance(distance, 0, static_cast<float>(distance)); };
  __syncwarp();  // the terms of the tile before have been read
  if (add_the_same<COLUMNS>(position, key)) {
    // The farthest diagonal's term: at SAME_FROM itself, fp32 may round the index of a table down to the entry before.
    const float same = term_of(position - key + 15);
    store_diagonals<COLUMNS>(to, lane, [&](int) { return same; });
  } else {
    store_diagonals<COLUMNS>(to, lane, [&](int n) { return term_of(position - key - (COLUMNS - 1) + n); });
  }
  __syncwarp();
}

// Terms that places add to the scores of a thread, in a tile of COLUMNS columns.
template <int COLUMNS>
struct PlaceTerms {
  u32 diagonals;   // address of the diagonal below that of the thread's first score
  float rows[2];   // of its rows
  u32 of_keys[4];  // the terms of two columns in each of two times 8 columns

  // The diagonals of the warp lie from `shared` on. Its first row is at `position`.
  DEVICE PlaceTerms(u32 shared, const ScoreFunction& function, int position, int lane)
      : diagonals(shared + 4 * (COLUMNS - 2 + 2 * (lane >> 2) - 2 * (lane & 3))) {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = function.of_position(position + 2 * (lane >> 2) + r);
  }

  // Terms of keys and distances in the n-th 8 columns, two of each row; n is 0, 1, 2 and so on. `keys` is the address
  // of the thread's first term.
  DEVICE void terms(float (&x)[4], int n, u32 keys) {
    if (ScoreFunction::ADDS_OF_DISTANCE) {
      const u32 from = diagonals - 4 * CHUNK * n;
      const float2 below = load_floats(from);
      x[0] = x[3] = below.y, x[1] = below.x, x[2] = __uint_as_float(load_shared(from + 8));
    }
    if (ScoreFunction::ADDS_OF_KEY) {
      if (n % 2 == 0) load_shared(of_keys, keys + 4 * CHUNK * n);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = (ScoreFunction::ADDS_OF_DISTANCE ? x[i] : -0.f) + __uint_as_float(of_keys[n % 2 * 2 + i % 2]);
    }
  }

  // `x` plus what the thread's row r adds.
  DEVICE float level(int r, float x) const { return ScoreFunction::ADDS_OF_POSITION ? x + rows[r] : x; }

  static DEVICE float2 load_floats(u32 from) {
    u32 x[2];
    load_shared(x, from);
    return make_float2(__uint_as_float(x[0]), __uint_as_float(x[1]));
  }
};
