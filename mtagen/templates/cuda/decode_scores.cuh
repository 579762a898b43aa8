#pragma once

#include "ptx.cuh"

// ---- Scores ---------------------------------------------------------------------------------------------------------

// Writes the scores of a warp's keys and ROWS rows, at most 24, to the slab as fp16. `k_tile` is the address of the
// warp's keys, `q` that of the first row's query, and `slab` that of the warp's first key in the first row.
template <class Tile, int ROWS>
DEVICE void write_scores(u32 k_tile, u32 q, u32 slab, const int* positions, int key, bool edge, int lane) {
  constexpr int KEYS = Tile::WARP_KEYS;
  const int lane_row = lane >> 2, lane_pair = lane & 3;
  float s[KEYS / 16][ROWS / 8][4] = {};
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk) {
    u32 queries[ROWS / 8][2];
#pragma unroll
    for (int r = 0; r < ROWS / 8; ++r)
      load_matrices(queries[r], q + (8 * r + (lane & 7)) * K_ROW + kk * 32 + (lane & 8) * 2);
#pragma unroll
    for (int m = 0; m < KEYS / 16; ++m) {
      u32 keys[4];
      load_matrices(keys, k_tile + (16 * m + (lane & 15)) * K_ROW + kk * 32 + (lane & 16));
#pragma unroll
      for (int r = 0; r < ROWS / 8; ++r) mma<Element>(s[m][r], keys, queries[r][0], queries[r][1]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS / 8; ++r) {
    const int row = 8 * r + 2 * lane_pair;
    const u32 to = slab + row * Tile::SLAB_ROW + lane_row * 2;
    if (edge) {  // hidden scores are zeros
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i)
        if (!visible(positions[row + (i & 1)], key + 8 * (i >> 1) + lane_row)) s[i >> 2][r][i & 3] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 8; ++i) {
      const float low = s[i >> 1][r][2 * (i & 1)], high = s[i >> 1][r][2 * (i & 1) + 1];
      constexpr float FACTOR = SCALES_QUERIES ? 1.f : SCORE_SCALE;
      const u32 scores = pack<fp16>(low * FACTOR, high * FACTOR);
      store_shared_halves(to + i * CHUNK_BYTES, to + Tile::SLAB_ROW + i * CHUNK_BYTES, scores);
    }
  }
}

// Writes the scores of a tile, whose first key is `key`.
template <class Tile>
DEVICE void write_tile_scores(u32 shared, u32 k_tile, const Work<Tile>& work, int key, int warp, int lane) {
  const int warp_key = warp * Tile::WARP_KEYS;  // the warp's first key, in the tile
  const int* const positions = region<const int>(Tile::POSITION);
  const bool edge = MASKS_SCORES && hides(work.length - work.head_rows, work.length - 1, key, key + Tile::KEYS - 1);
  for (int row = 0; row < work.rows; row += 24) {
    const u32 q = shared + Tile::Q + row * K_ROW;
    const u32 slab = shared + Tile::SLAB + row * Tile::SLAB_ROW + (CK - 1 + warp_key) * 2;
    if (Tile::ROWS > 16 && work.rows - row > 16)
      write_scores<Tile, 24>(k_tile + warp_key * K_ROW, q, slab, positions + row, key + warp_key, edge, lane);
    else if (Tile::ROWS > 8 && work.rows - row > 8)
      write_scores<Tile, 16>(k_tile + warp_key * K_ROW, q, slab, positions + row, key + warp_key, edge, lane);
    else
      write_scores<Tile, 8>(k_tile + warp_key * K_ROW, q, slab, positions + row, key + warp_key, edge, lane);
  }
}

// Moves the last columns of the slab to its beginning, for the next tile.
template <class Tile>
DEVICE void carry_columns(u32 slab, int rows) {
  constexpr int CARRY_CHUNKS = WINDOW_CHUNKS - 1;  // they hold CK - 1 columns
  for (int i = threadIdx.x; i < rows * CARRY_CHUNKS; i += Tile::THREADS) {
    u32 chunk[4];
    const u32 to = slab + i / CARRY_CHUNKS * Tile::SLAB_ROW + i % CARRY_CHUNKS * CHUNK_BYTES;
    load_shared(chunk, to + Tile::KEYS * 2);
    store_shared(to, chunk[0], chunk[1], chunk[2], chunk[3]);
  }
}
