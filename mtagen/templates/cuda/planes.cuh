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
