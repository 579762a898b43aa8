#pragma once

#include "backward_tiles.cuh"
#include "ptx.cuh"

// ---- Sums for the gradients of parameters ---------------------------------------------------------------------------
//
// term(i) is what the thread's i-th score of a step adds. The host adds up the sums of different warps. Each warp has
// memory of its own and adds in a fixed order, so that gradients are reproducible.

// Each main warp's number among those of all CTAs of its head.
DEVICE long long warp_of_head(long long head, const Cta& cta) {
  return (head * grid_tiles() + cta.place_of_block(OWNED)) * (ROW_TILES * PARTS) + warp_index();
}

// The sum of a step's terms. Four chains of additions wait for each other less than one does.
template <class Term>
DEVICE float sum_of_step(Term term) {
  float x[4] = {};
#pragma unroll
  for (int i = 0; i < PART / 2; ++i) x[i % 4] += term(i);
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// The sum of all scores of a head.
struct HeadTerms {
  float* to;
  float sum = 0.f;

  DEVICE HeadTerms(float* sums, long long head, const Cta& cta, const Parameters&)
      : to(sums + warp_of_head(head, cta)) {}

  template <class Term>
  DEVICE void add(Term term) {
    sum += sum_of_step(term);
  }

  DEVICE void finish(const Cta&) {
    sum = sum_of_lanes(sum, 32);
    if (lane_index() == 0) *to = sum;
  }
};

// The sums of columns of row tiles, in PART columns a warp. An mma multiplies 16 columns, transposed, by a column of
// ones. Each 16 columns have a column of their own, so that all share four sums a thread. The columns are Elements,
// like dS. The sums are fp32. A gradient that is not finite, such as those of a row whose dO is NaN, also reaches other
// columns of the warp, because the mma multiplies it by zeros.
struct ColumnSums {
  static constexpr int PAIRS = PART / (2 * CHUNK);
  static_assert(PAIRS <= 8 && PART % (2 * CHUNK) == 0, "an mma has 8 columns");
  float* to;  // of the sequence's first key
  float sums[4] = {};

  DEVICE ColumnSums(float* sums, long long head, const Cta&, const Parameters& parameters)
      : to(sums + (head * ROW_TILES + warp_index() % ROW_TILES) * parameters.all_tokens + parameters.first_key) {}

  // Adds 16 columns: matrices of 8 columns by the even and by the odd rows.
  DEVICE void add_pair(const u32 (&columns)[4], int pair, int lane_row) {
    const u32 ones = lane_row == pair ? pack<Element>(1.f, 1.f) : 0;
    mma<Element>(sums, columns, ones, ones);
  }

  // Stores the sums times a factor. The warp's first column is `first`, if the CTA's first key has column 0.
  DEVICE void store(const Cta& cta, const Place& at, int first, float factor) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = 2 * at.lane_pair + i % 2, column = first + 2 * CHUNK * pair + CHUNK * (i / 2) + at.lane_row;
      const int key = cta.c0 + PAD_LEFT + column;
      if (pair < PAIRS && 0 <= column && column < OWNED && key < cta.n_k) to[key] = sums[i] * factor;
    }
  }
};

// The sums of the scores of each key, of terms that depend on places.
struct KeyTerms : ColumnSums {
  u32 columns[4];

  using ColumnSums::ColumnSums;

  // Adds the terms x of the n-th 8 columns, two of each of the thread's rows; n is 0, 1, 2 and so on.
  DEVICE void add(const float (&x)[4], int n, int lane_row) {
    columns[n % 2] = transposed(pack<Element>(x[0], x[1]));
    columns[n % 2 + 2] = transposed(pack<Element>(x[2], x[3]));
    if (n % 2) add_pair(columns, n / 2, lane_row);
  }

  DEVICE void finish(const Cta& cta) const {
    const Place at(warp_index() / ROW_TILES);
    store(cta, at, PART * at.part, 1.f);
  }
};

// The sums of the gradients of each key's scores, read from their slab.
struct KeyGradients : ColumnSums {
  using ColumnSums::ColumnSums;

  // Adds a row tile, whose gradients all warps have stored.
  DEVICE void add_row_tile(const Cta& cta, const Place& at, int row_tile) {
    const int matrix = at.lane >> 3;  // of 8 columns by the even or the odd rows
    const u32 from = slab_row<Gradients>(cta.base, row_tile, at.lane & 7, matrix >> 1) + 2 * PART * at.part +
                     CHUNK_BYTES * (matrix & 1);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      u32 columns[4];
      load_matrices_transposed(columns, from + 2 * CHUNK_BYTES * pair);
      add_pair(columns, pair, at.lane_row);
    }
  }

  // Stores the sums times `factor`.
  DEVICE void finish(const Cta& cta, float factor) const {
    const Place at(warp_index() / ROW_TILES);
    store(cta, at, PART * at.part - SHIFT, factor);
  }
};

// The gradient of each score.
struct PairTerms {
  float* to;   // of the head
  int tokens;  // positions and keys

  DEVICE PairTerms(float* sums, long long head, const Cta&, const Parameters& parameters)
      : to(sums + head * parameters.all_tokens * parameters.all_tokens), tokens(parameters.all_tokens) {}

  // The thread's first score in this step has row `row` of the sequence and the position `position`.
  template <class Term>
  DEVICE void store(Term term, const Cta& cta, const Place& at, int row, int position) const {
#pragma unroll
    for (int i = 0; i < PART / 2; ++i) {
      const int r = i >> 1 & 1, column = at.column + i / 4 * CHUNK + (i & 1), key = cta.c0 + PAD_LEFT + column;
      if (row + r < cta.n_q && column < OWNED && key < cta.n_k)
        to[static_cast<long long>(position + r) * tokens + key] = term(i);
    }
  }

  DEVICE void finish(const Cta&) const {}
};

// Adds x to an entry of the warp's memory. Lanes with equal entries first add up their numbers, two at a time.
DEVICE void add_to_entry(float* to, int entry, float x) {
  const int lane = lane_index();
  u32 peers = __match_any_sync(~0u, entry);
  u32 rank = __popc(peers & (1u << lane) - 1);
  const bool first = rank == 0;
  peers &= ~1u << lane;
  while (__any_sync(~0u, peers)) {
    const int next = __ffs(peers);
    const float other = __shfl_sync(~0u, x, next ? next - 1 : lane);
    if (next) x += other;
    peers &= __ballot_sync(~0u, !(rank & 1));
    rank >>= 1;
  }
  if (first && x != 0.f) to[entry] += x;
  __syncwarp();
}

// The sums of the scores of each entry of a table, if their entry depends on their distance. Distances are equal on
// diagonals of the warp's row tile. Far from its own position, most tables have one entry for all of them.
template <int ENTRIES>
struct TableTerms {
  static constexpr int PAIRS = PART / 2;  // of columns of the warp's part
  float* to;
  int entry = 0;  // of `sum`
  float sum = 0.f;

  DEVICE TableTerms(float* sums, long long head, const Cta& cta, const Parameters&)
      : to(sums + warp_of_head(head, cta) * ENTRIES) {}

  // `gradients` is the address of the row tile's first gradient in the slab, `distance` its distance.
  // entry_of(distance) is an entry, and term_of(gradient, distance) what scores of one distance add to it.
  template <class Term, class EntryOf, class TermOf>
  DEVICE void add(Term term, EntryOf entry_of, TermOf term_of, u32 gradients, int distance) {
    // Of row pairs r, the lane reads column pairs r + pair, so that it has diagonal -2 pair and those beside it. The
    // diagonals of column pairs past the last, which continue at the first, are higher by PART.
    const int lane = lane_index(), pair = lane % PAIRS;
    const bool continues = PART - 2 * pair <= ROW_TILE;
    int distances[4], entries[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      distances[i] = distance - 2 * pair - i % 2 + (i / 2 && continues ? PART : 0);
      entries[i] = entry_of(distances[i]);
    }
    const int least = __reduce_min_sync(~0u, min(min(entries[0], entries[1]), min(entries[2], entries[3])));
    const int most = __reduce_max_sync(~0u, max(max(entries[0], entries[1]), max(entries[2], entries[3])));
    if (least == most) {
      if (least != entry) flush();
      entry = least;
      sum += sum_of_step(term);
      return;
    }
    // Sums of the diagonals -2 pair - 1, -2 pair and -2 pair + 1, and of those that are higher by PART.
    float low[2] = {}, middle[2] = {}, high[2] = {};
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROW_TILE / 2; i += 32 / PAIRS) {
      const int r = i + lane / PAIRS, column_pair = r + pair;
      const u32 from = gradients + r * SLAB_ROW + 4 * (column_pair % PAIRS);
      const float2 even = unpack<Element>(load_shared(from));
      const float2 odd = unpack<Element>(load_shared(from + Gradients::RING * (ROW_TILE / 2) * SLAB_ROW));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if ((column_pair >= PAIRS) != k) continue;
        low[k] += even.y, middle[k] += even.x + odd.y, high[k] += odd.x;
      }
    }
    // The next lane has the other scores of the lowest diagonal, as its highest.
    const int next = lane / PAIRS * PAIRS + (pair + 1) % PAIRS;
    const float highs[2] = {__shfl_sync(~0u, high[0], next), __shfl_sync(~0u, high[1], next)};
    const bool last = pair == PAIRS - 1;
    low[0] += last ? 0.f : highs[0];
    low[1] += last ? highs[0] : highs[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) add_to_entry(to, entries[i], term_of(i % 2 ? low[i / 2] : middle[i / 2], distances[i]));
  }

  DEVICE void flush() {
    sum = sum_of_lanes(sum, 32);
    if (lane_index() == 0) to[entry] += sum;
    __syncwarp();
    sum = 0.f;
  }

  DEVICE void finish(const Cta&) { flush(); }
};
