#pragma once

#include "ptx.cuh"

constexpr bool HIDES_EARLIER = SEEN_BEHIND != NO_LIMIT, HIDES_LATER = SEEN_AHEAD != NO_LIMIT;

// Whether a query of a block does not see some key of a block.
DEVICE bool hides(int first_position, int last_position, int first_key, int last_key) {
  return HIDES_LATER && last_key > first_position + SEEN_AHEAD ||
         HIDES_EARLIER && first_key < last_position - SEEN_BEHIND;
}

// The keys start <= key < end. Without a limit on earlier keys, `start` needs no comparison.
struct VisibleKeys {
  int start, end;

  // The end of the keys before `limit` that the query at a position sees.
  DEVICE static int end_of_row(int position, int limit) {
    return HIDES_LATER ? max(0, min(limit, position + SEEN_AHEAD + 1)) : limit;
  }

  // The keys before `end` that the query at a position sees.
  DEVICE static VisibleKeys of_row(int position, int end) {
    return {HIDES_EARLIER && end ? max(0, position - SEEN_BEHIND) : 0, end};
  }

  // The keys from `begin` to before `end` that some of `rows` queries from a position on sees. They begin with a whole
  // tile of KEYS keys.
  template <int KEYS>
  DEVICE static VisibleKeys of_rows(int position, int rows, int begin, int end) {
    return {HIDES_EARLIER ? max(begin, position - SEEN_BEHIND) / KEYS * KEYS : begin,
            HIDES_LATER ? min(end, position + rows + SEEN_AHEAD) : end};
  }

  // Keys before `end`, hidden ones too, that kernels read of `rows` rows from row r on: tiles of TILE rows and TILE
  // keys in which some row sees a key, with ROWS_AROUND rows and KEYS_AROUND keys on each side. Row 0 sits at
  // `position`.
  template <int TILE, int ROWS_AROUND, int KEYS_AROUND>
  DEVICE static VisibleKeys read(int r, int rows, int position, int end) {
    const int first = max(0, r - ROWS_AROUND) / TILE * TILE, last = (r + rows - 1 + ROWS_AROUND) / TILE * TILE + TILE;
    const VisibleKeys seen = of_rows<TILE>(position + first, last - first, 0, end);
    return {max(0, seen.start - KEYS_AROUND), min(end, max(0, seen.end + TILE - 1) / TILE * TILE + KEYS_AROUND)};
  }

  // The visible keys among the `count` keys from `begin` on, counted from `begin`.
  DEVICE VisibleKeys within(int begin, int count) const {
    const int last = max(0, min(end - begin, count));
    return {HIDES_EARLIER && last ? min(max(0, start - begin), count) : 0, last};
  }

  DEVICE bool exist() const { return start < end; }

  // These visible keys, counted from `key`.
  DEVICE VisibleKeys from(int key) const { return {start - key, end - key}; }

  // Both comparisons are made, because a branch would cost more.
  DEVICE bool has(int key) const { return (!HIDES_EARLIER | start <= key) & key < end; }

  DEVICE bool lacks(int key) const { return HIDES_EARLIER & key < start | key >= end; }

  // Whether some of `count` keys from `key` on are not visible.
  DEVICE bool lacks_some(int key, int count) const { return HIDES_EARLIER && key < start || key + count > end; }
};
