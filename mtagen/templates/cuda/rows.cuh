#pragma once

#include "strip_visible.cuh"

// ---- Blocks of a row: BLOCK_KEYS keys of 16 heads, one block per warp ----------------------------------------------
//
// A block lies in shared memory, a line of 128 bytes for each head. The number of each column of 16 bytes is XORed with
// head % 8. Eight lanes copy a line. __syncwarp makes copies visible to the other lanes.
constexpr int BLOCK_KEYS = 64, MAX_HEADS = 16, TILES_OF_BLOCK = 4;
constexpr int LINE = BLOCK_KEYS * 2, BLOCK_BYTES = MAX_HEADS * LINE;

// Address of keys 8 column to 8 column + 7 of a head.
DEVICE u32 in_block(u32 block, int head, int column) { return block + head * LINE + ((column ^ (head & 7)) << 4); }

// The n-th of the heads whose lines a lane copies, and the first of the lane's 8 keys.
DEVICE int copied_head(int n, int lane) { return 4 * n + (lane >> 3); }

DEVICE int copied_key(int lane) { return 8 * (lane & 7); }

// The address of a lane's first line of a row of a plane, and the distance from a head to the next.
template <class Type>
struct Row {
  Type* at;
  long long stride;

  DEVICE Row(Type* plane, long long first_slot, int count, int r, int pitch, int lane) {
    stride = static_cast<long long>(count) * pitch;
    at = plane + (first_slot + (lane >> 3)) * stride + static_cast<long long>(r) * pitch + copied_key(lane);
  }

  DEVICE Type* of(int n, int key) const { return at + 4 * n * stride + key; }
};

// Copies a block from key `key` on, of `heads` heads; other heads are zeros.
template <class Type>
DEVICE void copy_block_async(u32 block, const Row<Type>& row, int key, int heads, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int head = copied_head(n, lane);
    copy_async(in_block(block, head, lane & 7), row.of(n, key), head < heads);
  }
}

// Writes a block, which lanes have stored before, to memory.
template <class Type>
DEVICE void write_block(const Row<Type>& row, int key, u32 block, int heads, int lane) {
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int head = copied_head(n, lane);
    u32 x[4];
    load_shared(x, in_block(block, head, lane & 7));
    if (head < heads) store_global(row.of(n, key), x[0], x[1], x[2], x[3]);
  }
}

// The warps of a CTA write zeros to the blocks from the one that key `begin` begins, or that follows it, up to `end`.
template <int WARPS, class Type>
DEVICE void clear_blocks(const Row<Type>& row, int begin, int end, int heads, int warp, int lane) {
  const int first = (begin + BLOCK_KEYS - 1) / BLOCK_KEYS + warp;
  for (int key = first * BLOCK_KEYS; key < end; key += WARPS * BLOCK_KEYS)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (copied_head(n, lane) < heads) store_global(row.of(n, key), 0, 0, 0, 0);
}

// Writes zeros to the blocks that are read and have no visible key.
template <int WARPS, class Type>
DEVICE void clear_hidden_blocks(const Row<Type>& row, VisibleKeys seen, VisibleKeys read, int heads, int warp,
                                int lane) {
  clear_blocks<WARPS>(row, seen.end, read.end, heads, warp, lane);
  if (HIDES_EARLIER)
    clear_blocks<WARPS>(row, read.start / BLOCK_KEYS * BLOCK_KEYS, seen.start / BLOCK_KEYS * BLOCK_KEYS, heads, warp,
                        lane);
}

// ---- Tiles: 16 keys of 16 heads ------------------------------------------------------------------------------------
//
// In products that sum over heads, a tile is the left operand, with a row for each key and a column for each head; and
// so are results, which can be the operand of the next product. A lane has 2 keys, lane_row and the one 8 later, and 4
// heads, 2 lane_pair, the next, and both 8 later. A tile's float x[4 m + 2 k + e] belongs to key lane_row + 8 k and
// head 2 lane_pair + e + 8 m.
using Tile = float[8];
using Operand = u32[4];

// The key, within its block, of an element of tile i.
DEVICE int key_of(int e, int i, int lane) { return 16 * i + 8 * (e >> 1 & 1) + (lane >> 2); }

// The n-th of a lane's heads, and the number n of an element's head.
DEVICE int head_of(int n, int lane) { return 8 * (n >> 1) + 2 * (lane & 3) + (n & 1); }

DEVICE constexpr int head_of_element(int e) { return 2 * (e >> 2) + (e & 1); }

// The address that a lane passes to ldmatrix for tile i of a block: the matrices are at (keys, heads) = (0, 0), (8, 0),
// (0, 8) and (8, 8).
DEVICE u32 tile_of(u32 block, int i, int lane) {
  return in_block(block, 8 * (lane >> 4) + (lane & 7), 2 * i + (lane >> 3 & 1));
}

DEVICE void load_operand(Operand& a, u32 block, int i, int lane) {
  load_matrices_transposed(a, tile_of(block, i, lane));
}

// Hidden keys of tile i of a block become zeros. The block's visible keys are counted from its first.
DEVICE void clear_hidden(Operand& a, int i, VisibleKeys seen, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (seen.lacks(key_of(2 * n, i, lane))) a[n] = 0;
}

template <class Type>
DEVICE void operand_of(Operand& a, const Tile& x) {
#pragma unroll
  for (int n = 0; n < 4; ++n) a[n] = pack<Type>(x[2 * n], x[2 * n + 1]);
}

template <class Type>
DEVICE void unpack_tile(Tile& x, const Operand& a) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 pair = unpack<Type>(a[n]);
    x[2 * n] = pair.x, x[2 * n + 1] = pair.y;
  }
}

// Stores tile i of a block.
template <class Type>
DEVICE void store_tile(u32 block, int i, const Tile& x, int lane) {
  Operand a;
  operand_of<Type>(a, x);
  store_matrices_transposed(tile_of(block, i, lane), a);
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

  DEVICE void operator()(Tile& y, const Operand& x) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = 0.f;
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<Type>(y + 4 * n, x, b[n][0], b[n][1]);
  }
};

// ---- Sums over keys ------------------------------------------------------------------------------------------------

// Products over keys of 16 heads with 16 heads, summed over all blocks of a warp: of heads lane_row and lane_row + 8
// with heads 8 n + 2 lane_pair and the next.
template <class Type>
struct HeadProducts {
  float sums[8] = {};

  // Adds y x^T; both are operands of products over heads.
  DEVICE void add(const Operand& y, const Operand& x) {
    Operand a, b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = transposed(x[i]);
    a[0] = transposed(y[0]), a[1] = transposed(y[2]), a[2] = transposed(y[1]), a[3] = transposed(y[3]);
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<Type>(sums + 4 * n, a, b[2 * n], b[2 * n + 1]);
  }

  // Adds the sums of WARPS warps, which all call this, times a factor, to a matrix (16, 16). `thread` counts their
  // threads, and `shared` is the address of 256 floats per warp.
  template <int WARPS>
  DEVICE void add_to(float* matrix, float factor, u32 shared, int thread) const {
    const int warp = thread >> 5, lane = thread & 31;
    named_barrier(1, 32 * WARPS);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int out = (lane >> 2) + 8 * (e >> 1 & 1), in = 8 * (e >> 2) + 2 * (lane & 3);
      store_shared(shared + 4 * (warp * 256 + out * 16 + in), __float_as_uint(sums[e]), __float_as_uint(sums[e + 1]));
    }
    named_barrier(1, 32 * WARPS);
    for (int i = thread; i < 256; i += 32 * WARPS) {
      float sum = 0.f;
      for (int w = 0; w < WARPS; ++w) sum += __uint_as_float(load_shared(shared + 4 * (w * 256 + i)));
      matrix[i] += sum * factor;
    }
  }
};

// The sum over all keys of x, for a lane's 4 heads; each lane has the x of its own keys. `shared` has room for 16
// floats per warp.
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
