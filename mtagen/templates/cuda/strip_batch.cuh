#pragma once

#include "strip_sequence.cuh"

// A sequence of a batch. All sequences have the same rows and keys in planes.
struct Batch : SequenceRows {
  static constexpr bool PACKED = false, DECODES = false;
  static constexpr int top = 0, key0 = 0;
  int unseen;  // keys of the sequence before key 0 of planes

  DEVICE Batch(int number, int, int, int count, int keys, int off, int first, int unseen = 0)
      : SequenceRows{number, first, off, keys, keys, count}, unseen(unseen) {}

  // The place of row r and key j in the sequence, on which dropout's draws depend.
  DEVICE int drawn_query(int r) const { return first + r; }

  DEVICE int drawn_key(int j) const { return unseen + j; }
};
