#pragma once

#include "swizzle.cuh"

// ---- Slabs, and tiles of vectors, in shared memory ---------------------------------------------------------------
//
// A slab is a score tile in shared memory, a ring of row tiles. Even and odd rows are stored apart, because the
// convolution's fragments take every other row of a row tile together. TABLE is the table of taps that convolves the
// slab, HALO_ABOVE the number of rows that the convolution reads above.
struct Scores {
  using Type = fp16;
  static constexpr int SHARED = SHARED_S, RING = SCORE_RING, TABLE = 0, HALO_ABOVE = ROW_HALO;
};

struct Gradients {
  using Type = Element;
  static constexpr int SHARED = SHARED_G, RING = GRADIENT_RING, TABLE = 1, HALO_ABOVE = 0;
};

// Address of row 2 r + s of row tile `row_tile` of a slab, s from -ROW_TILE to ROW_TILE.
template <class Slab>
DEVICE u32 slab_row(u32 base, int row_tile, int r, int s) {
  constexpr int PAIRS = Slab::RING * (ROW_TILE / 2);
  int pair = row_tile * (ROW_TILE / 2) + r + (s >> 1);
  if (s < 0) pair += pair < 0 ? PAIRS : 0;
  if (s > 0) pair -= pair >= PAIRS ? PAIRS : 0;
  return base + Slab::SHARED + ((s & 1) * PAIRS + pair) * SLAB_ROW;
}

// From a row tile of a slab to the next, in bytes.
constexpr int SLAB_TILE = ROW_TILE / 2 * SLAB_ROW;

// Address of a row of a slab's first row tile.
template <class Slab>
DEVICE u32 row_of_first_tile(u32 base, int row) {
  constexpr int PAIRS = Slab::RING * (ROW_TILE / 2);
  return base + Slab::SHARED + ((row & 1) * PAIRS + (row >> 1)) * SLAB_ROW;
}

// Stores two rows of a fragment, x, into a slab, the first at `even`.
template <class Slab>
DEVICE void store_rows(u32 even, const float (&x)[4]) {
  store_shared(even, pack<typename Slab::Type>(x[0], x[1]));
  store_shared(even + Slab::RING * (ROW_TILE / 2) * SLAB_ROW, pack<typename Slab::Type>(x[2], x[3]));
}

// Two words of shared memory.
DEVICE float2 load_pair(u32 from) {
  u32 x[2];
  load_shared(x, from);
  return make_float2(__uint_as_float(x[0]), __uint_as_float(x[1]));
}

// The row at a place of a tile of Q or dO. In each row tile, row 2 r is at place r and row 2 r + 1 at place r + 8, as
// in fragments.
DEVICE constexpr int interleaved(int place) { return (place & ~15) + 2 * (place & 7) + (place >> 3 & 1); }

// COPIERS threads copy COUNT rows of DIM elements, from row `first` on, into a tile of TILE_ROWS rows. LANES threads
// share a row. Rows outside [0, rows) are zeros.
template <int DIM, int LANES, int COUNT, int TILE_ROWS, bool INTERLEAVED, int COPIERS>
DEVICE void copy_rows(u32 tile, const Element* from, long long stride, int first, int rows, int thread) {
  constexpr int SWEEP = COPIERS / LANES;
  static_assert((SWEEP & (SWEEP - 1)) == 0, "tile_address_from takes rows below a power of two that divides the step");
  const int place = thread / LANES, column = thread % LANES;
  const int row = first + (INTERLEAVED ? interleaved(place) : place);
  if (DIM / CHUNK < LANES && column >= DIM / CHUNK) return;
  const u32 to = tile_address<TILE_ROWS>(tile, place, column);
  from += row * stride + column * CHUNK;
#pragma unroll
  for (int x = 0; x < COUNT; x += SWEEP) {
    if (COUNT % SWEEP && x + place >= COUNT) break;
    const int below = INTERLEAVED ? interleaved(x) : x;
    const bool inside = static_cast<unsigned>(row + below) < static_cast<unsigned>(rows);
    copy_async(tile_address_from<TILE_ROWS>(to, x, 0), from + below * stride, inside);
  }
}

// Whether a neighbouring CTA contributes to a column of dS, too, and the column's row among the parts of dK.
DEVICE constexpr bool is_shared(int column) { return column < HALO || column >= OWNED; }

DEVICE constexpr int part_row(int column) { return column < HALO ? column : column - OWNED + HALO; }

// The threads of the CTA fill shared memory with zeros, from offset `begin` to `end`.
DEVICE void fill_zeros(u32 base, int begin, int end, int thread) {
  for (int at = begin + thread * 16; at < end; at += THREADS * 16) store_shared(base + at, 0, 0, 0, 0);
}

// The threads of the CTA fill two tables of pairs of neighbouring taps of head h: the convolution's and its adjoint's.
DEVICE void fill_taps(u32 base, const float* weight, int h, int thread) {
  for (int i = thread; i < 2 * CQ * TAP_WORDS; i += THREADS) {
    const bool adjoint = i >= CQ * TAP_WORDS;
    const int u = i / TAP_WORDS % CQ, first = i % TAP_WORDS - (CHUNK - 1);
    auto tap = [&](int column) {
      const int row = adjoint ? CQ - 1 - u : u, v = adjoint ? HALO - column : column;
      return 0 <= v && v < CK ? __ldg(weight + (h * CQ + row) * CK + v) : 0.f;
    };
    const float lo = tap(first), hi = tap(first + 1);
    store_shared(base + SHARED_TAPS + i * 4, adjoint ? pack<Element>(lo, hi) : pack<fp16>(lo, hi));
  }
}

// Taps (u, v) and (u, v + 1) of the convolution (table 0) or of its adjoint (table 1).
DEVICE u32 load_taps(u32 base, int table, int u, int v) {
  return load_shared(base + SHARED_TAPS + (table * CQ * TAP_WORDS + u * TAP_WORDS + v + (CHUNK - 1)) * 4);
}
