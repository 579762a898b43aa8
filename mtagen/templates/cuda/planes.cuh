#pragma once

#include "ptx.cuh"

// ---- Tiles of planes -----------------------------------------------------------------------------------------------

// THREADS threads write zeros to a tile of KEYS columns, of which the first `rows` of ROWS rows exist, from `to` on.
template <int THREADS, int ROWS, int KEYS, class Type>
DEVICE void clear_tile(Type* to, int pitch, int rows, int thread) {
  constexpr int CHUNKS = KEYS / CHUNK;
  for (int i = thread; i < ROWS * CHUNKS; i += THREADS)
    if (i / CHUNKS < rows)
      store_global(to + static_cast<long long>(i / CHUNKS) * pitch + i % CHUNKS * CHUNK, 0, 0, 0, 0);
}

// Calls clear(key) for the tiles of KEYS keys, from `begin` on, that are read and have no visible key.
template <int KEYS, class Clear>
DEVICE void for_hidden_tiles(VisibleKeys seen, VisibleKeys read, int begin, Clear clear) {
  if (HIDES_LATER || Sequence::DECODES)
    for (int key = max(seen.start, (seen.end + KEYS - 1) / KEYS * KEYS); key < read.end; key += KEYS) clear(key);
  if (HIDES_EARLIER)
    for (int key = max(begin, read.start / KEYS * KEYS); key < min(seen.start, read.end); key += KEYS) clear(key);
}
