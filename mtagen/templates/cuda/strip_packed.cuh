#pragma once

#include "strip_sequence.cuh"

// The document of `rows` rows of a strip from row r0 on. Packed documents are separate sequences. A strip has `count`
// places from place0 on, and there is a record for each tile of TILE places.
struct Packed : SequenceRows {
  static constexpr bool PACKED = true, DECODES = false;
  int top, key0;
  int query0, unseen;  // the document's first query; its keys before key 0 of planes

  // The document of a tile, the tile's first row in the document, and the document's numbers and first indices of
  // queries and keys. mtagen/planner/strip/documents.py has the order.
  struct Record {
    int document, row, n_q, query, n_k, key;
  };

  // If none of the rows exists, `keys` is 0.
  DEVICE Packed(int, int r0, int rows, const int* documents, int place0, int count, int skip) {
    const Record* record = reinterpret_cast<const Record*>(documents) + (place0 + r0) / TILE;
    const int n_q = __ldg(&record->n_q), n_k = __ldg(&record->n_k);
    const int begin = r0 / TILE * TILE - __ldg(&record->row);  // the document's first row, maybe in an earlier strip
    number = __ldg(&record->document);
    query0 = __ldg(&record->query);
    first = query0 - begin;
    off = n_k - n_q - query0;
    top = max(begin, max(skip - CONTEXT, 0));
    bottom = min(count, begin + n_q);
    const bool exist = max(top, r0) < min(bottom, r0 + rows);
    unseen = HIDES_EARLIER ? max(position(top) - SEEN_BEHIND, 0) / KEY_MULTIPLE * KEY_MULTIPLE : 0;
    keys = limit = exist ? max((HIDES_LATER ? min(n_k, position(bottom) + SEEN_AHEAD) : n_k) - unseen, 0) : 0;
    key0 = __ldg(&record->key) + unseen;
    off -= unseen;
  }

  DEVICE bool has_row(int r) const { return top <= r && r < bottom; }

  // The place of row r and key j in the document, on which dropout's draws depend.
  DEVICE int drawn_query(int r) const { return first + r - query0; }

  DEVICE int drawn_key(int j) const { return unseen + j; }
};
