#pragma once

#include "ptx.cuh"

// ---- Blocks of a row: BLOCK_KEYS keys of 16 heads, a block a warp ----------------------------------------------------
//
// A lane holds 8 keys of 4 heads, 16 bytes a head: keys 8 lane_row and on, heads 2 lane_pair, the next, and the two that
// are 8 later. So four lanes, and each lane in one access, cover whole lines of memory. A block falls into four tiles of
// 16 keys; of tile i a lane holds keys 2 i and 2 i + 1 of its 8. As the operand or the result of an mma, a tile has a
// row for each key, the even ones above the odd ones, and a column for each head: what a lane holds of memory is what
// it holds of operands and results, and results of one product are operands of the next.
constexpr int BLOCK_KEYS = 64, MAX_HEADS = 16, TILES_OF_BLOCK = 4;

using Block = u32[4][TILES_OF_BLOCK];  // of each head and tile, two elements

// The n-th of the heads that a lane holds.
DEVICE int head_of(int n, int lane) { return 2 * (lane & 3) + (n & 1) + 8 * (n >> 1); }

// Where a lane finds its elements of a row of a plane: those of its first head, and from a head to the next.
template <class Type>
struct Row {
  Type* at;
  long long stride;

  DEVICE Row(Type* plane, long long first_slot, int count, int r, int pitch, int lane) {
    stride = static_cast<long long>(count) * pitch;
    at = plane + first_slot * stride + static_cast<long long>(r) * pitch + 2 * (lane & 3) * stride + 8 * (lane >> 2);
  }

  DEVICE Type* of(int n, int key) const { return at + ((n & 1) + 8 * (n >> 1)) * stride + key; }
};

// Keys from the `seen`-th of a block on become zeros.
DEVICE void clear_unseen(Block& block, int seen, int lane) {
  const int mine = seen - 8 * (lane >> 2);  // of this lane's keys
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < TILES_OF_BLOCK; ++i)
      block[n][i] &= mine > 2 * i + 1 ? 0xffffffffu : mine > 2 * i ? 0xffffu : 0u;
}

template <class Type>
DEVICE void store_block(const Row<Type>& row, int key, const Block& block, const bool (&exists)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (exists[n]) store_global(row.of(n, key), block[n][0], block[n][1], block[n][2], block[n][3]);
}

// Blocks are copied to shared memory while the warp works on earlier ones. A lane copies what it reads itself, so that
// it need not wait for others.
constexpr int BLOCK_BYTES = BLOCK_KEYS * MAX_HEADS * 2;

// Copies a block from key `key` on; heads that do not exist are zeros.
template <class Type>
DEVICE void copy_block_async(u32 to, const Row<Type>& row, int key, const bool (&exists)[4], int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) copy_async(to + (32 * n + lane) * 16, row.of(n, key), exists[n]);
}

DEVICE void load_block(Block& block, u32 from, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) load_shared(block[n], from + (32 * n + lane) * 16);
}

// The warps of a CTA write zeros to the blocks from the one that key `end` begins, or that follows it, up to `keys`.
template <int WARPS, class Type>
DEVICE void clear_blocks(const Row<Type>& row, int end, int keys, const bool (&exists)[4], int warp) {
  const Block zeros = {};
  const int first = (end + BLOCK_KEYS - 1) / BLOCK_KEYS + warp;
  for (int key = first * BLOCK_KEYS; key < keys; key += WARPS * BLOCK_KEYS) store_block(row, key, zeros, exists);
}

// ---- Tiles: 16 keys of 16 heads --------------------------------------------------------------------------------------
//
// Of a tile's floats, x[4 m + 2 k + e] is of key k, 0 or 1, and of head 2 m + e of those that the lane holds.
using Tile = float[8];

// Tile i as the left operand of a product that sums over heads.
DEVICE void operand_of(u32 (&a)[4], const Block& block, int i) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    a[2 * m] = __byte_perm(block[2 * m][i], block[2 * m + 1][i], 0x5410);
    a[2 * m + 1] = __byte_perm(block[2 * m][i], block[2 * m + 1][i], 0x7632);
  }
}

template <class Type>
DEVICE void operand_of(u32 (&a)[4], const Tile& x) {
#pragma unroll
  for (int n = 0; n < 4; ++n) a[n] = pack<Type>(x[2 * n], x[2 * n + 1]);
}

// Tile i as floats.
template <class Type>
DEVICE void unpack_tile(Tile& x, const Block& block, int i) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = unpack<Type>(block[n][i]);
    x[4 * (n >> 1) + (n & 1)] = pair.x, x[4 * (n >> 1) + 2 + (n & 1)] = pair.y;
  }
}

template <class Type>
DEVICE void pack_tile(Block& block, int i, const Tile& x) {
#pragma unroll
  for (int n = 0; n < 4; ++n) block[n][i] = pack<Type>(x[4 * (n >> 1) + (n & 1)], x[4 * (n >> 1) + 2 + (n & 1)]);
}

DEVICE void scale_tile(Tile& x, float factor) {
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= factor;
}

// The mixing matrices of 16 heads as the right operand, zeros between groups of MIXED heads and where no head is.
// y = M x for each key, or TRANSPOSED: y = M^T x.
template <class Type, int MIXED, bool TRANSPOSED>
struct Mixture {
  u32 b[2][2];

  DEVICE Mixture(const float* weight, int first_head, int heads, int lane) {
    auto entry = [&](int out, int in) {
      const bool inside = out / MIXED == in / MIXED && out < heads && in < heads;
      return inside ? __ldg(weight + (first_head + out) * MIXED + in % MIXED) : 0.f;
    };
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int to = 8 * n + (lane >> 2), from = 8 * k + 2 * (lane & 3);
        b[n][k] = TRANSPOSED ? pack<Type>(entry(from, to), entry(from + 1, to))
                             : pack<Type>(entry(to, from), entry(to, from + 1));
      }
  }

  DEVICE void operator()(Tile& y, const u32 (&x)[4]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = 0.f;
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<Type>(y + 4 * n, x, b[n][0], b[n][1]);
  }
};

// ---- Sums over keys --------------------------------------------------------------------------------------------------

// Products over keys of 16 heads with 16 heads, summed over all blocks of a warp: of heads lane_row and lane_row + 8
// with heads 8 n + 2 lane_pair and the next.
template <class Type>
struct HeadProducts {
  float sums[8] = {};

  // Adds y x^T, both operands of products over heads.
  DEVICE void add(const u32 (&y)[4], const u32 (&x)[4]) {
    u32 a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = transposed(x[i]);
    a[0] = transposed(y[0]), a[1] = transposed(y[2]), a[2] = transposed(y[1]), a[3] = transposed(y[3]);
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<Type>(sums + 4 * n, a, b[2 * n], b[2 * n + 1]);
  }

  // Adds the sums of the CTA's warps, times a factor, to a matrix (16, 16); `shared` is room for 256 floats a warp.
  template <int WARPS>
  DEVICE void add_to(float* matrix, float factor, float* shared, int thread) const {
    const int warp = thread >> 5, lane = thread & 31;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int out = (lane >> 2) + 8 * (e >> 1 & 1), in = 8 * (e >> 2) + 2 * (lane & 3) + (e & 1);
      shared[warp * 256 + out * 16 + in] = sums[e];
    }
    __syncthreads();
    for (int i = thread; i < 256; i += 32 * WARPS) {
      float sum = 0.f;
      for (int w = 0; w < WARPS; ++w) sum += shared[w * 256 + i];
      matrix[i] += sum * factor;
    }
  }
};

// The sum over all keys of x, of which each lane has those of its own keys, of its 4 heads. `shared` is room for 16
// floats a warp.
template <int WARPS>
DEVICE void sum_over_keys(float (&x)[4], float* shared, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x[n] += __shfl_xor_sync(0xffffffffu, x[n], mask);
    if (lane < 4) shared[warp * MAX_HEADS + head_of(n, lane)] = x[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    x[n] = 0.f;
    for (int w = 0; w < WARPS; ++w) x[n] += shared[w * MAX_HEADS + head_of(n, lane)];
  }
}
