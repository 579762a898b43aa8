#pragma once

#include "compiler.cuh"
#include "hopper.cuh"
#include "swizzle.cuh"

// ---- Products and results of a main warpgroup
// ------------------------------------------------------------------------

DEVICE int thread_of_warpgroup() { return static_cast<unsigned>(thread_index()) % WARPGROUP; }

// d = rows of Q times a part's keys, or rows of dO times its values, of DIM elements.
template <int DIM>
DEVICE void issue_scores(float (&d)[PART / 2], u32 vectors, u32 keys) {
  const u64 a = operand(vectors), b = operand(keys);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < DIM / 16; ++kk)
    wgmma_scores(d, a + inner_columns(kk, ROWS), b + inner_columns(kk, KEYS), kk > 0);
  wgmma_commit();
}

// dq = dS K, in the columns of dQ that are the warpgroup's.
DEVICE void issue_queries(float (&dq)[DQ_COLUMNS / 2], u32 base, int part) {
  const u32 columns = part * (DQ_COLUMNS == PANEL ? KEYS * PANEL_ROW : 2 * DQ_COLUMNS);
  const u64 gradients = operand(base + SHARED_DS);
  const u64 keys = operand(base + SHARED_K + columns, KEYS * PANEL_ROW);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < KEYS / 16; ++kk)
    wgmma_queries(dq, gradients + inner_columns(kk, ROWS), keys + inner_rows(kk), kk > 0);
  wgmma_commit();
}

// dv += P^T dO, of a part's keys.
DEVICE void issue_values(float (&dv)[DV / 2], u32 probabilities, u32 output_gradients) {
  const u64 a = operand(probabilities), b = operand(output_gradients, ROWS * PANEL_ROW);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < ROW_TILES; ++kk) wgmma_values(dv, a + inner_rows(kk), b + inner_rows(kk), true);
  wgmma_commit();
}

// dk += dS^T Q, of a part's keys; the first row tile of dS belongs to the rows of Q above the step.
DEVICE void issue_keys(float (&dk)[D / 2], u32 gradients, u32 above, u32 queries) {
  const u64 a = operand(gradients), b = operand(queries, ROWS * PANEL_ROW);
  wgmma_fence();
  wgmma_keys(dk, a, operand(above, ROW_TILE * PANEL_ROW), true);
#pragma unroll
  for (int kk = 1; kk < ROW_TILES; ++kk) wgmma_keys(dk, a + inner_rows(kk), b + inner_rows(kk - 1), true);
  wgmma_commit();
}

// Adds the warpgroup's columns of dQ to the head's sums. The thread's first row is row `first`.
DEVICE void add_to_queries(float* dq_sum, float (&dq)[DQ_COLUMNS / 2], long long head, int first, int part,
                           const Cta& cta, int heads, const Place& at) {
  // A reduction takes four neighbouring registers, but the four columns that a thread has of a row are not neighbours.
  // All columns are moved before the first reduction. If each reduction moved its columns to the same registers, it
  // would wait until the reduction before has read them.
#pragma unroll
  for (int m = 0; m < DQ_COLUMNS / 16; ++m)
#pragma unroll
    for (int i = 8 * m + 2; i < 8 * m + 4; ++i) {
      const float x = dq[i];
      dq[i] = dq[i + 2];
      dq[i + 2] = x;
    }
  pin(dq);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + r;
    if (i < 0 || i >= cta.n_q || at.part >= DQ_PARTS) continue;
    float* const to = dq_sum + cta.query_row(head, i, heads) * D + part * DQ_COLUMNS + 4 * at.lane_pair;
#pragma unroll
    for (int m = 0; m < DQ_COLUMNS / 16; ++m) {
      const float* const x = dq + 8 * m + 4 * r;
      if (D % DQ_COLUMNS == 0 || part * DQ_COLUMNS + 16 * m < D) add_to_global(to + 16 * m, x[0], x[1], x[2], x[3]);
    }
  }
}

// Writes dK or dV; column 0 is key c0 + lag. Columns of dK that the CTA shares with a neighbour go to `parts`. dV has
// no such columns, and `parts` is null.
template <int DIM>
DEVICE void store_keys(Element* to, float* parts, const float* sums, const Cta& cta, const Place& at, float factor,
                       int lag) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // rows of a fragment are keys here
    const int column = PART * at.part + 16 * at.row_tile + at.lane_row + 8 * r, j = cta.c0 + lag + column;
    const bool shared = parts && is_shared(column);
    if (!shared && (column >= OWNED || j >= cta.n_k)) continue;
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
      const float* const x = sums + 4 * n + 2 * r;
      const int pair = 4 * n + at.lane_pair;
      if (shared)
        reinterpret_cast<float2*>(parts + part_row(column) * DIM)[pair] = make_float2(x[0], x[1]);
      else
        reinterpret_cast<u32*>(to + cta.key_row(j) * DIM)[pair] = pack<Element>(x[0] * factor, x[1] * factor);
    }
  }
}
