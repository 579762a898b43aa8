#pragma once

// ---- The part of a product that a CTA computes ---------------------------------------------------------------------

// ROWS rows of a slot from row r0 on, up to WALK keys from key `walk` on. The slot belongs to sequence b and head h.
struct Part {
  int slot, b, h, r0, walk;

  DEVICE Part(int count, int keys, int b0, int n_heads) {
    const int walks = (keys + WALK - 1) / WALK, row_tiles = (count + ROWS - 1) / ROWS;
    slot = blockIdx.x / (walks * row_tiles), r0 = blockIdx.x % row_tiles * ROWS;
    walk = blockIdx.x / row_tiles % walks * WALK;
    b = b0 + slot / n_heads, h = slot % n_heads;
  }
};
