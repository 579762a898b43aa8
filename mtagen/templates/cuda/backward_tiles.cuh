// ---- Slabs, and tiles of vectors, in shared memory ---------------------------------------------------------------
//
// A slab is a ring of RING row tiles of scores or of their gradients. It keeps even and odd rows apart, so that every
// other row of a row tile, which is what the convolution's fragments take together, is a row of ldmatrix.

template <int RING>
constexpr int PARITY = RING * (ROW_TILE / 2) * SLAB_ROW;  // bytes from a slab's even rows to its odd ones

// Row 2 g + s of row tile `row_tile` of a slab, s from -ROW_TILE to ROW_TILE.
template <int RING>
DEVICE u32 slab_row(u32 slab, int row_tile, int g, int s) {
  constexpr int PAIRS = RING * (ROW_TILE / 2);
  int pair = row_tile * (ROW_TILE / 2) + g + (s >> 1);
  if (s < 0) pair += pair < 0 ? PAIRS : 0;
  if (s > 0) pair -= pair >= PAIRS ? PAIRS : 0;
  return slab + ((s & 1) * PAIRS + pair) * SLAB_ROW;
}

// Of each row tile, row 2 g lies at place g of tiles of vectors and row 2 g + 1 at place g + 8, as the fragments have
// them.
DEVICE constexpr int interleaved(int place) { return (place & ~15) + 2 * (place & 7) + (place >> 3 & 1); }

// COPIERS threads copy COUNT vectors, from row `first`, into a tile of TILE_ROWS; rows outside [0, rows) become zeros.
template <int COUNT, int TILE_ROWS, bool INTERLEAVED, int COPIERS>
DEVICE void copy_rows(u32 tile, const Element* from, long long stride, int first, int rows, int thread) {
  constexpr int SWEEP = COPIERS / ROW_LANES;
  const int place = thread / ROW_LANES, column = thread % ROW_LANES;
  const int row = first + (INTERLEAVED ? interleaved(place) : place);
  if (D / CHUNK < ROW_LANES && column >= D / CHUNK) return;
  const u32 to = tile_address<TILE_ROWS>(tile, place, column);
  from += row * stride + column * CHUNK;
#pragma unroll
  for (int x = 0; x < COUNT; x += SWEEP) {
    if (COUNT % SWEEP && x + place >= COUNT) break;
    const int below = INTERLEAVED ? interleaved(x) : x;
    const bool inside = static_cast<unsigned>(row + below) < static_cast<unsigned>(rows);
    copy_async(to + x * PANEL_ROW, from + below * stride, inside);
  }
}

// The threads of the CTA fill shared memory from `begin` to `end` with zeros.
DEVICE void fill_zeros(u32 base, int begin, int end, int thread) {
  for (int at = begin + thread * 16; at < end; at += THREADS * 16) store_shared(base + at, 0, 0, 0, 0);
}

// The threads of the CTA make tables of pairs of neighbouring taps of head h: of the convolution, then of its adjoint.
DEVICE void fill_taps(u32 base, const float* weight, int h, int thread) {
  for (int i = thread; i < 2 * CQ * TAP_WORDS; i += THREADS) {
    const bool adjoint = i >= CQ * TAP_WORDS;
    const int u = i / TAP_WORDS % CQ, first = i % TAP_WORDS - (CHUNK - 1);
    auto tap = [&](int column) {
      const int row = adjoint ? CQ - 1 - u : u, v = adjoint ? HALO - column : column;
      return 0 <= v && v < CK ? __ldg(weight + (h * CQ + row) * CK + v) : 0.f;
    };
    const float lo = tap(first), hi = tap(first + 1);
    store_shared(base + SHARED_TAPS + i * 4, adjoint ? pack<Element>(lo, hi) : pack<fp16>(lo, hi));
  }
}

// Taps (u, v) and (u, v + 1) out of the table of the convolution, 0, or of its adjoint, 1.
DEVICE u32 load_taps(u32 base, int table, int u, int v) {
  return load_shared(base + SHARED_TAPS + (table * CQ * TAP_WORDS + u * TAP_WORDS + v + (CHUNK - 1)) * 4);
}
