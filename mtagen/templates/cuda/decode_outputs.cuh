#pragma once

#include "ptx.cuh"

// ---- Outputs --------------------------------------------------------------------------------------------------------

// A warp's part of out^T, from its keys: [DV, PAIRS], relative to the peak of each pair at the last addition.
template <class Tile>
struct WarpOutputs {
  static constexpr int PAIR_TILES = Tile::PAIRS / 8;
  float o[DV / 16][PAIR_TILES][4] = {}, o_peak[PAIR_TILES][2];

  DEVICE WarpOutputs() {
#pragma unroll
    for (int p = 0; p < PAIR_TILES; ++p) o_peak[p][0] = o_peak[p][1] = NO_PEAK;
  }

  // Makes the outputs relative to the current peaks.
  DEVICE void rescale(int lane) {
    const float* const peaks = region<const float>(Tile::PEAK);
    bool risen = false;
    float peak[PAIR_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * PAIR_TILES; ++i) {
      peak[i >> 1][i & 1] = peaks[8 * (i >> 1) + 2 * (lane & 3) + (i & 1)];
      risen |= peak[i >> 1][i & 1] != o_peak[i >> 1][i & 1];
    }
    if (!__any_sync(~0u, risen)) return;
#pragma unroll
    for (int i = 0; i < 2 * PAIR_TILES; ++i) {
      const int p = i >> 1, e = i & 1;
      const float factor = exp2_fast(o_peak[p][e] - peak[p][e]);
      o_peak[p][e] = peak[p][e];
#pragma unroll
      for (int m = 0; m < DV / 16; ++m) o[m][p][e] *= factor, o[m][p][2 + e] *= factor;
    }
  }

  // out^T += V^T P^T
  DEVICE void add(u32 shared, u32 v_tile, int pairs, int warp, int lane) {
    const int warp_key = warp * Tile::WARP_KEYS;
    const u32 v_rows = v_tile + (warp_key + (lane & 7) + (lane >> 4) * 8) * V_ROW + (lane & 8) * 2;
    const u32 p_rows = shared + Tile::P + (lane & 7) * Tile::P_ROW + (warp_key + (lane & 8)) * 2;
#pragma unroll
    for (int kk = 0; kk < Tile::WARP_KEYS / 16; ++kk) {
      u32 weights[PAIR_TILES][2];
#pragma unroll
      for (int p = 0; p < PAIR_TILES; ++p) load_matrices(weights[p], p_rows + 8 * p * Tile::P_ROW + kk * 32);
#pragma unroll
      for (int m = 0; m < DV / 16; ++m) {
        u32 values[4];
        load_matrices_transposed(values, v_rows + 16 * kk * V_ROW + m * 32);
#pragma unroll
        for (int p = 0; p < PAIR_TILES; ++p)
          if (8 * p < pairs) mma<Element>(o[m][p], values, weights[p][0], weights[p][1]);
      }
    }
  }

  // Writes the outputs over the ring, as [WARPS][PAIRS][DV].
  DEVICE void write(int warp, int lane) const {
    float* const outputs = region<float>(Tile::RING) + warp * Tile::PAIRS * DV;
#pragma unroll
    for (int i = 0; i < 2 * PAIR_TILES; ++i) {
      const int pair = 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
#pragma unroll
      for (int e = 0; e < DV / 8; ++e)
        outputs[pair * DV + 8 * e + (lane >> 2)] = o[e >> 1][i >> 1][2 * (e & 1) + (i & 1)];
    }
  }
};
