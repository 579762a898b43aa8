#pragma once

#include "ptx.cuh"

// ---- Masks in tables ------------------------------------------------------------------------------------------------

// The keys from `first` to `last`, which a row sees.
struct KeyRange {
  int first, last;

  DEVICE bool hides(int key) const { return key < first || key > last; }
};

// The keys that each row of a sequence sees.
struct KeyRanges {
  const int *first_keys, *last_keys;  // of the sequence's first row
  int rows;

  DEVICE bool has(int row) const { return static_cast<unsigned>(row) < static_cast<unsigned>(rows); }

  // The keys that a row sees, counted from `key0` on. A row that does not exist sees none.
  DEVICE KeyRange of(int row, int key0) const {
    if (!has(row)) return {1 << 30, -1};
    return {__ldg(first_keys + row) - key0, __ldg(last_keys + row) - key0};
  }
};

// The first key that any row from `row` to `end_row` sees, and the end of these keys. A warp computes both together.
struct KeysSeen {
  int first = 1 << 30, end = 0;

  DEVICE KeysSeen(const KeyRanges& ranges, int row, int end_row, int lane) {
    for (int r = row + lane; r < end_row; r += 32) {
      const KeyRange keys = ranges.of(r, 0);
      first = min(first, keys.first), end = max(end, keys.last + 1);
    }
    first = __reduce_min_sync(~0u, first), end = __reduce_max_sync(~0u, end);
  }
};

// The keys that a warp's 16 rows see, counted from the CTA's first key.
struct WarpRows {
  KeyRanges ranges;
  int row, key0;
  int first_of_all, last_of_all;  // the keys from one to the other are seen by all rows that exist

  // Takes the rows from `row` on.
  DEVICE void locate(const KeyRanges& of_sequence, int first_row, int first_key, int lane) {
    ranges = of_sequence, row = first_row, key0 = first_key;
    const bool exists = ranges.has(row + (lane & 15));
    const KeyRange keys = ranges.of(row + (lane & 15), key0);
    first_of_all = __reduce_max_sync(~0u, exists ? keys.first : -(1 << 30));
    last_of_all = __reduce_min_sync(~0u, exists ? keys.last : 1 << 30);
  }

  // Whether some key from `key` to `last_key` is hidden from some row.
  DEVICE bool hide_some(int key, int last_key) const { return key < first_of_all || last_key > last_of_all; }

  // The keys that the lane's row 2 lane_row + r sees.
  DEVICE KeyRange of_lane(int r, int lane) const { return ranges.of(row + 2 * (lane >> 2) + r, key0); }
};
