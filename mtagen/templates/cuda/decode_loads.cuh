#pragma once

#include "ptx.cuh"
#include "tensor_rows.cuh"

// ---- Loads ----------------------------------------------------------------------------------------------------------

// A CTA copies rows key, key + 1, ... of K or V; rows outside [first, last) are zeros.
template <int COLUMNS, int KEYS, int THREADS>
DEVICE void load_tile(u32 tile, KeyRows rows, int key, int first, int last) {
  constexpr int ROW = 2 * COLUMNS + 16, CHUNKS = COLUMNS / 8, POWER = CHUNKS & -CHUNKS;
  constexpr int LANES = POWER < 32 ? POWER : 32, ROWS = THREADS / LANES;  // LANES take a row, ROWS rows at a time
  const int row = threadIdx.x / LANES, column = threadIdx.x % LANES;
  if (ROWS > KEYS && row >= KEYS) return;
  tile += row * ROW + column * 16;
  rows = rows.from(key + row, column * 8);
  auto copy = [&](bool whole) {
#pragma unroll
    for (int r = 0; r < KEYS; r += ROWS, rows.skip(ROWS)) {
      const bool inside = whole || (first <= key + row + r && key + row + r < last);
#pragma unroll
      for (int c = 0; c < CHUNKS; c += LANES)
        copy_async_stream(tile + r * ROW + c * 16, rows.address() + c * 8, inside);
    }
  };
  if (first <= key && key + KEYS <= last)
    copy(true);
  else
    copy(false);
}

// The ring of tiles. Item 2 i is K of tile i, item 2 i + 1 its V.
template <class Tile>
struct Ring {
  static constexpr int LAST = (Tile::STAGES - 1) * Tile::RING_TILE;
  const Work<Tile>& work;
  const KeyRows k, v;
  u32 first, slot;  // the first slot, and the slot that was filled last or is filled next

  DEVICE Ring(const Problem& x, const Work<Tile>& work) : work(work), k(work.keys(x)), v(work.values(x)) {
    first = shared_address(dynamic) + Tile::RING, slot = first + LAST;
#pragma unroll
    for (int item = 0; item < Tile::STAGES - 1; ++item) load(item, first + item * Tile::RING_TILE);
  }

  DEVICE void load(int item, u32 to) {
    if (item / 2 < work.tiles) {
      if (item % 2 == 0)
        load_tile<D, Tile::KEYS, Tile::THREADS>(to, k, work.first_key(item / 2), 0, work.length);
      else
        load_tile<DV, Tile::KEYS, Tile::THREADS>(to, v, work.first_output(item / 2), work.begin, work.end);
    }
    copy_commit();
  }

  // Waits for an item, refills the slot of the item before, which all warps have read, and returns the item's slot.
  DEVICE u32 await(int item) {
    copy_wait<Tile::STAGES - 2>();
    __syncthreads();
    load(item + Tile::STAGES - 1, slot);
    slot = slot == first + LAST ? first : slot + Tile::RING_TILE;
    return slot;
  }
};

// A ring that looks up the pages of the item that it loads next before it waits for another item.
template <class Tile>
struct LookAheadRing : Ring<Tile> {
  using Ring<Tile>::Ring;

  DEVICE u32 await(int item) {
    const int next = item + Tile::STAGES - 1;
    if (next % 2 == 0)
      this->k.look_up(this->work.first_key(next / 2));
    else
      this->v.look_up(this->work.first_output(next / 2));
    return Ring<Tile>::await(item);
  }
};

// Loads the queries, head by head, `head_rows` each. Rows before the sequence's start, and rows of no head, are zeros.
template <class Tile>
DEVICE void load_queries(u32 shared, const Problem& x, const Work<Tile>& work) {
  const Element* q = x.q + work.b * x.q_stride_b + work.head * x.q_stride_h;
#pragma unroll 3
  for (int i = threadIdx.x; i < Tile::ROWS * (D / CHUNK); i += Tile::THREADS) {
    const int row = i / (D / CHUNK), column = i % (D / CHUNK), h = row / work.head_rows, n = row % work.head_rows;
    const int position = work.length - work.head_rows + n;
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (h < work.heads && position >= 0)
      chunk = *reinterpret_cast<const uint4*>(q + h * x.q_stride_h + n * x.q_stride_n + column * CHUNK);
    u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    if constexpr (SCALES_QUERIES) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = unpack<Element>(words[e]);
        words[e] = pack<Element>(pair.x * SCORE_SCALE, pair.y * SCORE_SCALE);
      }
    }
    store_shared(shared + Tile::Q + row * K_ROW + column * CHUNK_BYTES, words[0], words[1], words[2], words[3]);
    if (column == 0) store_shared(shared + Tile::POSITION + row * 4, position);
  }
}
