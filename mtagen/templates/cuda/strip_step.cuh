#pragma once

#include "strip_sequence.cuh"

// A sequence of a decode step. Each has its own length, and the last row of the strip is its last query. With a limit
// on earlier keys, planes begin with the first key that the first row sees.
struct Step : SequenceRows {
  static constexpr bool PACKED = false, DECODES = true;
  static constexpr int top = 0;
  int key0;

  // At most `longest` keys of the sequence count; without lengths, all of them.
  DEVICE Step(int number, int, int, const int* seqlens, int has_seqlens, int longest, int count, int keys,
              int first = 0)
      : SequenceRows{number, first, 0, keys, has_seqlens ? min(seqlens[number], longest) : longest, count} {
    key0 = HIDES_EARLIER ? max(0, limit - count - SEEN_BEHIND) : 0;
    limit -= key0;
    off = limit - count;
  }

  // A sequence may be shorter than the strip and than planes.
  DEVICE bool has_score(int r, int j) const { return position(r) >= 0 && j < limit; }

  // The keys that row r sees, which are none before the sequence begins. A decode step has no other rows without keys.
  DEVICE VisibleKeys visible_keys(int r, int) const {
    return VisibleKeys::of_row(position(r), position(r) < 0 ? 0 : VisibleKeys::end_of_row(position(r), limit));
  }
};
