#pragma once

#include "ptx.cuh"

// ---- Convolution ----------------------------------------------------------------------------------------------------
//
// A convolved tile is TOKENS new tokens of one head. Row m of its 16 rows is chunk m % CHUNKS of the keys, for token
// m / CHUNKS. Tap i of the convolution is row shift u = i / WINDOW_CHUNKS in chunk d = i % WINDOW_CHUNKS of the window;
// a step sums two taps.

// Makes the B operands of all heads: for tap i, T[k, n] = W[u, 8 d + k - n].
template <class Tile>
DEVICE void make_toeplitz(u32 shared, const float* weight, int heads) {
  const int lane = threadIdx.x & 31, lane_row = lane >> 2, lane_pair = lane & 3;
#pragma unroll 3
  for (int i = threadIdx.x >> 5; i < heads * STEPS; i += Tile::WARPS) {
    const int h = i / STEPS, step = i % STEPS;
    auto weight_at = [&](int tap, int k) {
      const int u = tap / WINDOW_CHUNKS, v = tap % WINDOW_CHUNKS * CHUNK + k - lane_row;
      return u < CQ && 0 <= v && v < CK ? __ldg(weight + (h * CQ + u) * CK + v) : 0.f;
    };
    auto half = [&](int tap) { return pack<fp16>(weight_at(tap, 2 * lane_pair), weight_at(tap, 2 * lane_pair + 1)); };
    store_shared(shared + Tile::TOEPLITZ + i * STEP + lane * FRAGMENT, half(2 * step), half(2 * step + 1));
  }
}

// Bytes from a window's first row and chunk to those of tap i. The tap after the last has no weights and reads the
// last.
template <class Tile>
DEVICE constexpr int tap_offset(int i) {
  const int tap = i < CQ * WINDOW_CHUNKS ? i : i - 1;
  return tap / WINDOW_CHUNKS * Tile::SLAB_ROW + tap % WINDOW_CHUNKS * CHUNK_BYTES;
}

// The new token of row m of a convolved tile whose first token is `token`. Rows past the last token repeat it, with its
// scores and its mask, because they write to the same P.
template <class Tile>
DEVICE int token_of_row(const Work<Tile>& work, int token, int m) {
  return min(token + m / Tile::CHUNKS, work.n_new - 1);
}

// Convolves tokens from `token` on of head h; c[2 r] and c[2 r + 1] belong to row lane_row + 8 r. The slab's first key
// is `key`.
template <class Tile>
DEVICE void convolve(float (&c)[4], u32 shared, const Work<Tile>& work, int h, int token, int key, int lane) {
  constexpr int CHUNKS = Tile::CHUNKS;
  const int row = h * work.head_rows + token_of_row(work, token, lane & 15);
  const u32 from = shared + Tile::SLAB + row * Tile::SLAB_ROW + (lane & 15) % CHUNKS * CHUNK_BYTES;
  const u32 toeplitz = shared + Tile::TOEPLITZ + h * (STEPS * STEP) + lane * FRAGMENT;
  const int first = work.first_position;
  const bool edge = MASKS_WINDOWS && hides(first, first + work.n_new - 1, key, key + CK - 1 + Tile::KEYS - 1);
  float sums[2][4] = {};  // sums of even and of odd steps, so that an mma need not wait for the one before
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 a[4], weights[2];
    load_matrices(a, from + (lane < 16 ? tap_offset<Tile>(2 * step) : tap_offset<Tile>(2 * step + 1)));
    load_shared(weights, toeplitz + step * STEP);
    if (edge) {  // scores of keys that are hidden from the token are zeros
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = (lane >> 2) + 8 * (i & 1), chunk = m % CHUNKS + (2 * step + (i >> 1)) % WINDOW_CHUNKS;
        const int position = first + token_of_row(work, token, m);
        const int j = key + CHUNK * chunk + 2 * (lane & 3);
        if (!visible(position, j)) a[i] &= 0xffff0000u;
        if (!visible(position, j + 1)) a[i] &= 0xffffu;
      }
    }
    mma<fp16>(sums[step & 1], a, weights[0], weights[1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = sums[0][i] + sums[1][i];
}
