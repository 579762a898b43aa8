#pragma once

#include "exponents.cuh"
#include "ptx.cuh"

// ---- Softmax of two rows per thread ---------------------------------------------------------------------------------
//
// FlashAttention subtracts a row's running maximum from its exponents of 2. This kernel subtracts a reference: the
// maximum of some earlier tiles plus HEADROOM. It is at most log2(LIMIT) below the running maximum. So a probability
// needs neither the maximum of the whole tile nor the other threads of the row: it follows the convolution 8 columns at
// a time, and the convolved scores need not stay in registers.
//
// If a thread's probabilities of a row exceed LIMIT, the reference was too low. The kernel then convolves the tile
// again, and the row's maximum becomes its reference: a restart. If scores do not grow along the keys, only the first
// tile restarts. If keys are hidden, the other rows of the warp keep their references: rows see different keys, and if
// a row changed its reference because of another row, the last bits of its results would depend on keys that are hidden
// from it. If no key is hidden, all rows of the warp get new references.

// Minus the reference of a row that has seen no key: the probability of its first visible key exceeds LIMIT. It is
// finite, so that exp2(-inf + NO_REFERENCE) is 0.
constexpr float NO_REFERENCE = 1e20f;

// Brings a sum to a new reference.
DEVICE float rescaled(float sum, float factor) {
#pragma unroll
  for (int i = 0; i < RESCALINGS; ++i) sum *= factor;
  return sum;
}

// The factor that turns a convolved score, which is stored times `score_scale`, into an exponent of 2. It is never 0,
// so that -inf stays -inf.
DEVICE float softmax_exponent(float scale, float score_scale) {
  return fmaxf(fabsf(scale) * (LOG2_E / score_scale), 1e-20f);
}

// The maximum of the thread's row r of a tile, in every thread that has a part of the row.
template <int N>
DEVICE float maximum_of_row(const float (&x)[N], int r) {
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 2 * r; i < N; i += 4) maximum = fmaxf(maximum, fmaxf(x[i], x[i + 1]));
  maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
  return fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
}

// Rows 2 lane_row and 2 lane_row + 1 of a warp's 16. The scores passed in are final (after modify): restart() takes
// their maximum.
template <class Element>
struct Softmax {
  float exponent;                                 // a score times this is the exponent of 2
  float shift[2] = {NO_REFERENCE, NO_REFERENCE};  // minus the reference of each row
  float sum[2] = {-0.f, -0.f};                    // sum of each row's probabilities in this thread's columns
  float added[2];                                 // sum of the probabilities of the current tile

  // Begins a tile. The compiler leaves out an addition to -0, which changes no number.
  DEVICE void begin() { added[0] = added[1] = -0.f; }

  // Computes the probabilities of 8 columns of both rows, one half of an A operand. Not fmaf(): where `exponent` is
  // the constant 1, the compiler can instead fuse the addition with the product that produced c.
  DEVICE void add_columns(u32 (&p)[4], bool high, const float* c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float x = exp2_fast(c[2 * r] * exponent + shift[r]);
      const float y = exp2_fast(c[2 * r + 1] * exponent + shift[r]);
      p[2 * high + r] = pack<Element>(x, y);
      add(r, make_float2(x, y));
    }
  }

  // Adds two probabilities of the thread's row r to the sum of the tile.
  DEVICE void add(int r, float2 p) { added[r] += p.x + p.y; }

  // Ends the tile. Returns false if any thread of the warp has exceeded a reference by too much; restart() must then
  // end the tile. Until then the sign of `sum` marks the rows that have, because a flag would take a register. It is
  // negative from the start, because no row has a reference before the first tile.
  DEVICE bool end() {
    if (!__any_sync(~0u, fmaxf(added[0], added[1]) > LIMIT)) {
      sum[0] += added[0], sum[1] += added[1];
      return true;
    }
    if constexpr (HIDES_KEYS) {  // else all rows get new references
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = fmaxf(added[r], __shfl_xor_sync(~0u, added[r], 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        sum[r] = most > LIMIT ? -fabsf(sum[r]) : sum[r] + added[r];
      }
    }
    return false;
  }

  // Computes the probabilities of a tile again, from all its convolved scores. If a row has exceeded its reference, its
  // maximum becomes the reference, and outputs that were summed before must be rescaled() by `factor`. Other rows keep
  // the sums of end(), which on a masked tile are sums of rounded probabilities, unlike the sums computed here.
  template <int N>
  DEVICE void restart(u32 (&p)[N / 8][4], const float (&c)[N], float (&factor)[2]) {
    bool exceeds[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = maximum_of_row(c, r);
      exceeds[r] = !HIDES_KEYS || signbit(sum[r]);
      factor[r] = move(r, exceeds[r] ? fminf(shift[r], -maximum * exponent - HEADROOM) : shift[r]);
    }
    begin();
#pragma unroll
    for (int n = 0; n < N / 4; ++n) add_columns(p[n / 2], n & 1, c + 4 * n);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (exceeds[r]) sum[r] += added[r];
  }

  // Moves row r's reference. Returns the factor of what was summed before.
  DEVICE float move(int r, float next) {
    const float factor = exp2_fast((next - shift[r]) / RESCALINGS);
    shift[r] = next;
    sum[r] = rescaled(fabsf(sum[r]), factor);
    return factor;
  }

  // The sum of the whole row, in every thread that has a part of the row.
  DEVICE float total(int r) const {
    float x = sum[r];
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

// Softmax::add_columns() of exponents of 2.
template <class Element>
DEVICE void add_exponents(Softmax<Element>& softmax, u32 (&p)[4], bool high, const float* x) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 y = make_float2(exp2_fast(x[2 * r]), exp2_fast(x[2 * r + 1]));
    p[2 * high + r] = pack<Element>(y.x, y.y);
    softmax.add(r, y);
  }
}

// Whether row r has a reference.
template <class Element>
DEVICE bool has_reference(const Softmax<Element>& softmax, int r) {
  return softmax.shift[r] != NO_REFERENCE;
}

// The shift of row r, or 0 if it has no reference.
template <class Element>
DEVICE float origin_of(const Softmax<Element>& softmax, int r) {
  return has_reference(softmax, r) ? softmax.shift[r] : 0.f;
}

// Softmax::restart() of exponents of 2, which count from their row's shift, or from 0 if the row has no reference.
// Rows that have not exceeded their references get the probabilities that they had, to the last bit. Tells which rows
// have `exceeded` them.
template <class Element, int N>
DEVICE void restart_from_exponents(Softmax<Element>& softmax, u32 (&p)[N / 8][4], float (&x)[N], float (&factor)[2],
                                   bool (&exceeded)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float maximum = maximum_of_row(x, r);
    const float most = has_reference(softmax, r) ? 0.f : NO_REFERENCE;  // a row that has seen no key gets no reference
    exceeded[r] = !HIDES_KEYS || signbit(softmax.sum[r]);
    const float moved = exceeded[r] ? fminf(most, -maximum - HEADROOM) : 0.f;
    factor[r] = softmax.move(r, exceeded[r] ? origin_of(softmax, r) + moved : softmax.shift[r]);
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) x[i] += moved, x[i + 1] += moved;
  }
  softmax.begin();
#pragma unroll
  for (int n = 0; n < N / 4; ++n) add_exponents(softmax, p[n / 2], n & 1, x + 4 * n);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (exceeded[r]) softmax.sum[r] += softmax.added[r];
}

// Ends a tile like Softmax::end() if all its rows exceeded their references, so that restart() gives them new ones.
template <class Element>
DEVICE void renew_references(Softmax<Element>& softmax) {
#pragma unroll
  for (int r = 0; r < 2; ++r) softmax.sum[r] = -fabsf(softmax.sum[r]);
}
