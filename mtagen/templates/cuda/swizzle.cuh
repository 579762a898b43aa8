#pragma once

#include "ptx.cuh"
#include "tensor_rows.cuh"

// ---- Swizzled tiles in shared memory --------------------------------------------------------------------------------
//
// A tile of 16-bit elements is stored in panels of 64 columns, 128 bytes per row. The eight 16-byte columns of a
// panel's row are permuted by row % 8, as in wgmma's 128-byte swizzle, so that the rows of a column are in different
// banks.

constexpr int PANEL = 64;  // columns

constexpr int PANEL_ROW = 128;  // bytes

// Address of 16-byte column `column` in row `row` of a tile of ROWS rows.
template <int ROWS>
DEVICE u32 tile_address(u32 tile, int row, int column) {
  return tile + (column >> 3) * (ROWS * PANEL_ROW) + row * PANEL_ROW + (((column ^ row) & 7) << 4);
}

// The address `rows` rows below and `columns` columns to the right of `at`, the address of row r and column c. r and c
// must be less than a power of two that divides `rows` and `columns` respectively; any r will do if `rows` is a
// multiple of 8.
template <int ROWS>
DEVICE u32 tile_address_from(u32 at, int rows, int columns) {
  return (at ^ ((rows ^ columns) & 7) << 4) + rows * PANEL_ROW + (columns >> 3) * (ROWS * PANEL_ROW);
}

// COPIERS threads copy ROWS vectors, from row `first` of n_rows rows on, into a tile. Rows that do not exist are zeros:
// `first` may be negative.
template <int ROWS, int COLUMNS, int COPIERS, class Rows>
DEVICE void load_tile(u32 tile, Rows rows, int first, int n_rows, int thread) {
  constexpr int LANES = COLUMNS > 128 ? 32 : COLUMNS > 64 ? 16 : COLUMNS > 32 ? 8 : 4;  // threads that share a row
  constexpr int SWEEP = COPIERS / LANES;
  static_assert((SWEEP & (SWEEP - 1)) == 0, "tile_address_from takes rows below a power of two that divides the step");
  const int r = thread / LANES, column = thread % LANES;
  if (column >= COLUMNS / CHUNK) return;
  const u32 to = tile_address<ROWS>(tile, r, column);
  rows = rows.from(first + r, column * CHUNK);
#pragma unroll
  for (int x = 0; x < ROWS; x += SWEEP, rows.skip(SWEEP))
    if (ROWS % SWEEP == 0 || r + x < ROWS) {
      const bool exists = static_cast<unsigned>(first + r + x) < static_cast<unsigned>(n_rows);
      copy_async(tile_address_from<ROWS>(to, x, 0), rows.address(), exists);
    }
}

// Loads a tile from a tensor whose rows are `stride` elements apart.
template <int ROWS, int COLUMNS, int COPIERS, class Element>
DEVICE void load_tile(u32 tile, const Element* from, long long stride, int first, int n_rows, int thread) {
  load_tile<ROWS, COLUMNS, COPIERS>(tile, TensorRows<Element>{from, stride}, first, n_rows, thread);
}
