#pragma once

#include "dropout.cuh"
#include "rows.cuh"

// ---- Dropout of blocks of a row ------------------------------------------------------------------------------------
//
// A lane's line has 8 keys of a head, whose mask comes from one draw. So lanes draw for the lines that they copy,
// and no number is drawn twice. Bits 15 - i and 31 - i are those of word i of a lane's 16 words, 4 per line.

// The mask of a lane's lines of the block from key `key` of the sequence on, in the row of query `query`. The row's
// first head has slot `first_slot`.
DEVICE u32 kept_of_block(const Dropout& dropout, u32 first_slot, u32 query, u32 key, int lane) {
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    u32 kept[4];
    dropout.keep_chunk(kept, first_slot + copied_head(n, lane), query, (key + copied_key(lane)) / 8);
#pragma unroll
    for (int w = 0; w < 4; ++w) bits |= (kept[w] & 0x80008000u) >> (4 * n + w);
  }
  return bits;
}

// Lanes set the dropped keys of a block to zeros. They have stored the block before, or read it afterwards.
DEVICE void drop_block(u32 block, u32 kept, int lane) {
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const u32 line = in_block(block, copied_head(n, lane), lane & 7);
    u32 x[4];
    load_shared(x, line);
#pragma unroll
    for (int w = 0; w < 4; ++w) x[w] &= halves_of_bits(kept << (4 * n + w));
    store_shared(line, x[0], x[1], x[2], x[3]);
  }
  __syncwarp();
}
