#pragma once

#include "ptx.cuh"

// ---- Softmax --------------------------------------------------------------------------------------------------------
//
// Several lanes hold a pair of a convolved tile: 4 per row, and a token has CHUNKS rows. PEAK holds the largest score
// of each pair so far, in units of log2; SUM holds the sum of exp2(score - peak) of each lane's two rows.

// Combines values over the lanes that hold a token's rows. The two values belong to rows lane_row and lane_row + 8.
template <class Tile, class Combine>
DEVICE void combine_lanes(float (&x)[2], Combine combine) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int other = 1; other < 4 * Tile::CHUNKS && other < 32; other *= 2)
      x[r] = combine(x[r], __shfl_xor_sync(~0u, x[r], other));
  if (Tile::CHUNKS == 16) x[0] = x[1] = combine(x[0], x[1]);  // both rows belong to the same token
}

// Computes the convolution and softmax of a tile: P = exp2(score - peak), in the order of pairs and of the tile's
// outputs.
template <class Tile>
DEVICE void softmax_tile(u32 shared, const Work<Tile>& work, int tile, float exponent, int warp, int lane) {
  constexpr int CHUNKS = Tile::CHUNKS;
  const int lane_row = lane >> 2, lane_pair = lane & 3;
  float* const peaks = region<float>(Tile::PEAK);
  float2* const sums = region<float2>(Tile::SUM);
  const int column = work.first_output(tile), first_position = work.first_position;
  const bool edge = hides(first_position, first_position + work.n_new - 1, column, column + Tile::KEYS - 1) ||
                    column < work.begin || column + Tile::KEYS > work.end || (!BOUNDS_KEYS && first_position < 0);
  for (int index = warp; index < work.heads * work.token_tiles; index += Tile::WARPS) {
    const int h = index / work.token_tiles, token = index % work.token_tiles * Tile::TOKENS;
    const ScoreFunction score_function = work.score_function(h);
    float c[4];
    convolve(c, shared, work, h, token, work.first_key(tile) - (CK - 1), lane);
    int pair[2];
    float score[2][2], peak[2], top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int m = lane_row + 8 * r, n = token_of_row(work, token, m);
      pair[r] = h * work.n_new + n;
      peak[r] = peaks[pair[r]];
      const int key = column + m % CHUNKS * CHUNK + 2 * lane_pair;  // of the first of two
      const float distance = static_cast<float>(first_position + n - key);
      score[r][0] = score_function.modify(c[2 * r] * exponent, first_position + n, key, distance);
      score[r][1] = score_function.modify(c[2 * r + 1] * exponent, first_position + n, key + 1, distance - 1.f);
      if (edge) {
        const int position = first_position + n;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = key + e;
          if (!visible(position, j) || j < work.begin || j >= work.end || (!BOUNDS_KEYS && position < 0))
            score[r][e] = -INFINITY;
        }
      }
      top[r] = fmaxf(score[r][0], score[r][1]);
    }
    float2 sum = sums[index * 32 + lane];
    if (__any_sync(~0u, top[0] > peak[0] || top[1] > peak[1])) {
      combine_lanes<Tile>(top, [](float x, float y) { return fmaxf(x, y); });
      __syncwarp();  // all lanes have read their peaks
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], peak[r]);
        (r ? sum.y : sum.x) *= exp2_fast(peak[r] - top[r]);
        peaks[pair[r]] = peak[r] = top[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float p0 = exp2_fast(score[r][0] - peak[r]), p1 = exp2_fast(score[r][1] - peak[r]);
      (r ? sum.y : sum.x) += p0 + p1;
      const u32 p_row = shared + Tile::P + pair[r] * Tile::P_ROW;
      store_shared(p_row + (lane_row + 8 * r) % CHUNKS * CHUNK_BYTES + lane_pair * 4, pack<Element>(p0, p1));
    }
    sums[index * 32 + lane] = sum;
  }
}

// Computes the sums of pairs from those of lanes.
template <class Tile>
DEVICE void total_sums(const Work<Tile>& work, int warp, int lane) {
  const float2* const sums = region<const float2>(Tile::SUM);
  float* const totals = region<float>(Tile::TOTAL);
  for (int index = warp; index < work.heads * work.token_tiles; index += Tile::WARPS) {
    const float2 sum = sums[index * 32 + lane];
    float total[2] = {sum.x, sum.y};
    combine_lanes<Tile>(total, [](float x, float y) { return x + y; });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = index % work.token_tiles * Tile::TOKENS + ((lane >> 2) + 8 * r) / Tile::CHUNKS;
      if (n < work.n_new) totals[index / work.token_tiles * work.n_new + n] = total[r];
    }
  }
}
