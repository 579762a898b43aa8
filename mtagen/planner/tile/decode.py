"""Plan of fused split-K decode: scores of a few queries, convolved on the tensor cores; K and V are
read once.

A CTA owns a split (a range of keys) and some query heads that share these keys, with the last cq -
1 + n_new query rows of each head. It streams K and V through a ring of tiles, and its warps divide
each part of the work in another way:

    scores^T [keys, rows] = K Q^T            a warp takes some keys of the tile, for all rows, 8
    rows to an mma slab    [rows, keys]                    the score tile in fp16, after the last ck
    - 1 columns of the tile before c        [16, 8] += slab x T            a warp takes some (head,
    new token)s; 16 = (new token, chunk of 8 keys) out^T    [dv, pairs] += V^T P^T          a warp
    takes some keys, for all pairs (head, new token), 8 pairs to an mma

A chunk of the score tile, 8 keys in 16 bytes, is a row of an ldmatrix operand. The operand that
begins one chunk later is the same operand shifted by a row. So a tap of the convolution is a (query
row, chunk of the window), and an mma sums two taps. Outputs lag the keys by ``pad_right`` columns,
so that the windows of a tile end inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import sympy
from sympy import Expr, Min, ceiling

from ...errors import PlanError, explain
from ...spec import MAX_NEW_TOKENS, Spec
from ..cache import Cache
from ..cuda.memory import SharedMap
from ..cuda.score import parameters, sink
from ..cuda.toeplitz import CHUNK, SCORE_EXPONENT
from ..geometry.mask import Mask
from ..kernel import Buffer, Kernel, numbers, reads, strides, writes
from ..names import kernel_name
from ..passes import Fields
from ..sizes import BATCH, GROUP, HEADS, KV_HEADS, N_NEW, SPLITS
from ..splits import SplitRule, split_keys, split_rule
from ..targets import RESERVED_SHARED, Target, get_target
from .combine import Combine
from .loops import END_SEEN, FIRST_SEEN
from .passes import TilePass
from .supported import check_supported

# Names in the template: the position of the first new token, and the number of keys in use.
_FIRST_POSITION, _LENGTH = sympy.symbols("first_position length", integer=True)
# For each kernel: upper limits of a CTA's query heads and of its pairs (query head, new token), and its warps.
_KERNELS = ((1, 8, 4), (4, 8, 4), (8, 16, 8))
_HEAD_ROWS = 6  # query rows per head if a CTA takes several heads: one new token with cq = 6
_BUSY_WARPS = 8  # warps of a multiprocessor with which loads, products and softmax overlap
_STAGES = (3, 2)
_TILE_ELEMENTS = 128 * 128  # upper limit of the elements of K or V in a tile: 32 KiB
_COMBINE_WARPS = 4  # warps that share the splits of a row
_LANES = 32  # of a warp
_REGISTERS = 128  # lower limit of a thread's registers

CTA_HEADS = sympy.Symbol("cta_heads", integer=True, positive=True)


@dataclass(frozen=True)
class DecodeTile:
    """One decode kernel.

    Attributes:
        spec: the request.
        heads: upper limit of the query heads of a CTA.
        pairs: upper limit of the (query head, new token) pairs of a CTA; a multiple of 8.
        warps: warps of a CTA.
        keys: keys of a tile; a power of two, up to 128.
        stages: tiles in the ring, which are of K and V in turn.
    """

    spec: Spec
    heads: int
    pairs: int
    warps: int
    keys: int
    stages: int

    @property
    def role(self) -> str:
        """The kernel's role in its pass."""
        return f"decode_{self.heads}"

    @property
    def rows(self) -> int:
        """Upper limit of a CTA's query rows; enough for one head with the most new tokens."""
        return -(-max(self.spec.cq - 1 + MAX_NEW_TOKENS, _HEAD_ROWS * self.heads) // 8) * 8

    @property
    def chunks(self) -> int:
        """Number of chunks of 8 keys in a tile."""
        return self.keys // CHUNK

    @property
    def tokens(self) -> int:
        """Number of new tokens in one convolved tile of 16 rows."""
        return 16 // self.chunks

    @property
    def slab_row(self) -> int:
        """Bytes from one row of the score tile to the next: an odd number of chunks avoids bank
        conflicts.
        """
        return 16 * (self.chunks + window_chunks(self.spec) - 1 | 1)

    @property
    def weights_row(self) -> int:
        """Bytes from the probabilities of one pair to those of the next; an odd number of chunks."""
        return 2 * self.keys + 16

    @property
    def ring_tile(self) -> int:
        """Bytes of a tile of K or V. Rows are padded by 16 bytes to avoid bank conflicts."""
        return self.keys * (2 * max(self.spec.head_dim, self.spec.value_head_dim) + 16)

    def heads_that_fit(self, n_new: int) -> int:
        """Return the upper limit of a CTA's heads for a number of new tokens."""
        return min(self.heads, self.rows // (self.spec.cq - 1 + n_new), self.pairs // n_new)

    @property
    def convolved_tiles(self) -> int:
        """Upper limit of a CTA's convolved tiles."""
        counts = range(1, MAX_NEW_TOKENS + 1)
        return max(self.heads_that_fit(n_new) * -(-n_new // self.tokens) for n_new in counts)

    @cached_property
    def shared(self) -> SharedMap:
        """The map of the CTA's shared memory.

        After the key loop, the ring holds the outputs of every warp.
        """
        outputs = self.warps * self.pairs * self.spec.value_head_dim * 4
        return SharedMap.of(
            (
                ("RANGES", 8 * table_rows(self.spec), 16),  # first, so that it lies at the same place in all kernels
                ("RING", max(self.stages * self.ring_tile, outputs), 16),
                ("Q", self.rows * (2 * self.spec.head_dim + 16), 16),
                ("TOEPLITZ", self.heads * convolution_steps(self.spec) * 256, 16),
                ("SLAB", self.rows * self.slab_row, 16),
                ("P", self.pairs * self.weights_row, 16),
                ("SUM", 256 * self.convolved_tiles, 16),
                ("PEAK", 4 * self.pairs, 16),
                ("TOTAL", 4 * self.pairs, 16),
                ("POSITION", 4 * self.rows, 16),
            )
        )

    def resident(self, target: Target) -> int:
        """Return the number of resident CTAs per multiprocessor, as shared memory and registers
        allow.
        """
        by_shared = target.shared_per_multiprocessor // (self.shared.size + RESERVED_SHARED)
        by_registers = target.registers_per_multiprocessor // (_REGISTERS * 32 * self.warps)
        return max(1, min(by_shared, by_registers))

    def registers(self, target: Target) -> int:
        """Return the upper limit of a thread's registers, which ``__launch_bounds__`` implies."""
        return target.registers_of(self.resident(target) * self.warps)

    def rule(self, target: Target) -> SplitRule:
        """Return the rule for the number of splits."""
        return split_rule(self.resident(target), self.keys, target.multiprocessors)


@dataclass(frozen=True)
class TileDecode(TilePass):
    """The decode kernels of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        tiles: the decode kernels, in the order of their numbers of heads.
    """

    spec: Spec
    target: str
    tiles: tuple[DecodeTile, ...]

    pass_name = "decode"
    template = "decode.cu.j2"

    @classmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TileDecode]:
        return decode_candidates(spec, target)

    @property
    def name(self) -> str:
        """The name of the source file."""
        return kernel_name("tile", "decode", self.spec, self.target)

    @property
    def fields(self) -> Fields:
        """The fields of the decision: the tiles."""
        names = ("heads", "pairs", "warps", "keys", "stages")
        return {"tiles": [{name: getattr(tile, name) for name in names} for tile in self.tiles]}

    @property
    def cost(self) -> float:
        """Multiprocessor cycles per key of one head, which are those of reading its key and value."""
        target = get_target(self.target)
        bytes_per_key = (self.spec.head_dim + self.spec.value_head_dim) * self.spec.itemsize
        return bytes_per_key / target.dram_bytes_per_cycle

    @property
    def score_exponent(self) -> int:
        """Exponent of the scale of scores in shared memory, which holds q.k 2^-exponent."""
        return SCORE_EXPONENT

    @property
    def scales_queries(self) -> bool:
        """Whether Q is scaled by 2^-8, which is exact in bf16.

        With fp16 the scores are scaled one by one.
        """
        return self.spec.dtype == "bf16"

    @property
    def window_chunks(self) -> int:
        """Number of chunks that 8 output columns read."""
        return window_chunks(self.spec)

    @property
    def steps(self) -> int:
        """Number of mma's that convolve a tile."""
        return convolution_steps(self.spec)

    @property
    def combine(self) -> Combine:
        """The merging of splits."""
        return Combine(self.spec, self.target, "decode", (BATCH, HEADS, N_NEW), _COMBINE_WARPS)

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    @property
    def cache(self) -> Cache:
        """Where keys and values lie."""
        return Cache.of(self.spec)

    @property
    def looks_ahead(self) -> bool:
        """Whether each lane of a warp looks up one page of a tile before the tile is loaded.

        A tile that begins inside a page has rows of one page more than its keys fill.
        """
        size = self.spec.page_size
        return size is not None and all(tile.keys // size + 1 <= _LANES for tile in self.tiles)

    @property
    def key_begin(self) -> Expr:
        """First key that any new token sees, in the template's names."""
        if self.mask.is_tabulated:
            return Min(FIRST_SEEN, END_SEEN)
        return self.mask.begin(_FIRST_POSITION)

    @property
    def key_end(self) -> Expr:
        """End of the keys that are split, in the template's names: of those in use, or of those that tables name."""
        return END_SEEN if self.mask.is_tabulated else _LENGTH

    @property
    def table_rows(self) -> int:
        """Number of rows that shared memory has room for in the mask's tables: a power of two, or 0 without tables.

        A row's place is its position modulo this number.
        """
        return table_rows(self.spec)

    @property
    def split_keys(self) -> Expr:
        """Upper limit of the keys of a cache that are split."""
        return split_keys(self.mask)

    @property
    def masks_windows(self) -> bool:
        """Whether a window may hold scores that count for some new tokens and not for others."""
        return self.mask.zeroes_terms and (self.mask.hides_earlier or self.spec.pad_right > 0)

    def resident(self, tile: DecodeTile) -> int:
        """Return the number of resident CTAs of a kernel per multiprocessor."""
        return tile.resident(get_target(self.target))

    def rule(self, tile: DecodeTile) -> SplitRule:
        """Return the rule for the number of splits of a kernel."""
        return tile.rule(get_target(self.target))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of results, which the host allocates."""
        out = Buffer("out", "q", (BATCH, HEADS, N_NEW, self.spec.value_head_dim))
        return (out, Buffer("lse", "fp32", (BATCH, HEADS, N_NEW)))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The decode kernels and the one that merges splits."""
        arguments = (
            *reads("Element", "q", "k", "v", restrict=False),
            *reads("float", "weight", restrict=False),
            *sink(self.spec, restrict=False),
            *parameters(self.spec, restrict=False),
            *(replace(table, restrict=False) for table in self.tables),
            *reads("int", "seqlens", restrict=False, optional=True),
            *self.cache.cuda_arguments(),
            *writes("Element", "out", restrict=False),
            *writes("float", "lse", "partial", "partial_lse", restrict=False),  # the same memory if there is one split
            *strides("q", "k", "v"),
            *numbers("int", "n_max", "kv_heads", "group", "n_new", "cta_heads", "num_splits", "least_keys"),
            *numbers("float", "scale"),
        )
        grid = (BATCH * KV_HEADS * ceiling(GROUP / CTA_HEADS) * SPLITS,)
        decode = (
            Kernel(
                tile.role,
                kernel_name("tile", tile.role, self.spec, self.target),
                arguments,
                grid,
                32 * tile.warps,
                tile.shared.size,
                tile.registers(get_target(self.target)),
            )
            for tile in self.tiles
        )
        return (*decode, self.combine.kernel)

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment that explain its numbers."""
        yield "n_max keys a cache, of which seqlens[b] (or all, if null) are in use, the new tokens' included;"
        yield f"q holds the {self.spec.cq - 1} queries before the new ones, then the new ones; cta_heads heads a CTA."
        yield "partial (batch * heads * n_new, num_splits, dv) and partial_lse (log2) are not used for one split."
        yield f"Convolution: {self.steps} mma.m16n8k16 for 16 x 8 scores; outputs lag keys by {self.spec.pad_right}."

    def kernel_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield facts about the kernels for the plan's table."""
        for tile in self.tiles:
            yield tile.role, "CTA", f"up to {tile.heads} heads, {tile.keys} keys a tile, {tile.warps} warps"
            yield tile.role, "shared memory", f"{tile.shared.size} bytes, {tile.stages} stages"


def window_chunks(spec: Spec) -> int:
    """Return the number of chunks of 8 columns that 8 neighbouring outputs read."""
    return -(-(spec.ck + CHUNK - 1) // CHUNK)


def table_rows(spec: Spec) -> int:
    """Return the rows of a head, rounded up to a power of two, if the mask has tables; else 0."""
    rows = spec.cq - 1 + MAX_NEW_TOKENS
    return 1 << (rows - 1).bit_length() if Mask.of(spec).is_tabulated else 0


def convolution_steps(spec: Spec) -> int:
    """Return the mma's of a convolved tile.

    A tap is a row shift and a chunk; an mma sums two taps.
    """
    return -(-spec.cq * window_chunks(spec) // 2)


def decode_candidates(spec: Spec, target: Target) -> tuple[TileDecode]:
    """Return the only plan of decode: one candidate, because reading keys and values bounds them
    all.

    Raises:
        PlanError: the shape does not fit; the message names the limit.
    """
    check_supported(spec, target)
    tiles = (_fit(spec, target, *kernel) for kernel in _KERNELS)
    return (TileDecode(spec, target.name, tuple({tile.heads: tile for tile in tiles}.values())),)


def _fit(spec: Spec, target: Target, heads: int, pairs: int, warps: int) -> DecodeTile:
    """Return the largest tile with enough warps per multiprocessor, else the largest that fits."""
    candidates = [
        DecodeTile(spec, heads, pairs, min(warps, keys // 16), keys, stages)
        for keys in (128, 64, 32)
        for stages in _STAGES
        if keys * max(spec.head_dim, spec.value_head_dim) <= _TILE_ELEMENTS
    ]
    for enough in (_BUSY_WARPS, 1):
        for tile in candidates:
            if tile.shared.size <= target.shared_per_block and tile.resident(target) * tile.warps >= enough:
                return tile
    if heads > 1:
        return _fit(spec, target, heads // 2, pairs, warps)
    rule = f"{target.name} has {target.shared_per_block} bytes of shared memory, decode needs {tile.shared.size}"
    raise PlanError(explain("head_dim", spec.head_dim, rule, "a smaller head_dim, or backend='triton'"))
