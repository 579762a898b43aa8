"""Fused split-K decode: the scores of a few queries, convolved on the tensor cores, keys and values read once.

A CTA owns a split, a range of keys, and some query heads that share them, each with its last cq - 1 + n_new query rows.
It streams K and V through a ring of tiles and shares out its work anew at each step:

    scores^T [keys, rows] = K Q^T            a warp takes some keys of the tile, for all rows, 8 rows to an mma
    slab    [rows, keys]                    the scores in fp16, behind the last ck - 1 columns of the tile before
    c        [16, 8] += slab x T            a warp takes some (head, new token)s; 16 = (new token, chunk of 8 keys)
    out^T    [dv, pairs] += V^T P^T          a warp takes some keys, for all pairs (head, new token), 8 pairs to an mma

A chunk of the slab, 8 keys in 16 bytes, is a row of an ldmatrix operand, and the operand one chunk on is the same a
row further. So a tap of the convolution is a (query row, chunk of the window), and an mma sums two taps. Outputs lag
the keys by ``pad_right`` columns, so that a tile's windows end inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
from sympy import Expr, ceiling

from ...errors import PlanError, explain
from ...spec import MAX_NEW_TOKENS, Spec
from ..geometry.mask import Mask
from ..kernel import BATCH, GROUP, HEADS, KV_HEADS, Buffer, Kernel, numbers, reads, strides, writes
from ..names import kernel_name
from ..passes import Fields
from ..splits import SplitRule, split_keys, split_rule
from ..targets import RESERVED_SHARED, Target, get_target
from .combine import SPLITS, Combine
from .memory import SharedMap
from .passes import TilePass
from .supported import check_supported
from .toeplitz import CHUNK, SCORE_EXPONENT

_FIRST_POSITION = sympy.Symbol("first_position", integer=True)  # of the first new token, in the template
# Of each kernel: query heads and pairs (query head, new token) of a CTA, at most, and its warps.
_KERNELS = ((1, 8, 4), (4, 8, 4), (8, 16, 8))
_HEAD_ROWS = 6  # query rows a head, where a CTA takes several: one new token of cq = 6
_BUSY_WARPS = 8  # of a multiprocessor, such that loads, products and softmax overlap
_STAGES = (3, 2)
_TILE_ELEMENTS = 128 * 128  # of K or V in a tile, at most: 32 KiB
_COMBINE_WARPS = 4  # that share the splits of a row
_REGISTERS = 128  # that a thread is given at least

N_NEW, CTA_HEADS = sympy.symbols("n_new cta_heads", integer=True, positive=True)


@dataclass(frozen=True)
class DecodeTile:
    """One decode kernel.

    Attributes:
        spec: the request.
        heads: query heads of a CTA, at most.
        pairs: (query head, new token) pairs of a CTA, at most; a multiple of 8.
        warps: warps of a CTA.
        keys: keys of a tile; a power of two, up to 128.
        stages: tiles, of K and V in turn, in the ring.
    """

    spec: Spec
    heads: int
    pairs: int
    warps: int
    keys: int
    stages: int

    @property
    def role(self) -> str:
        """Its name among the pass's kernels."""
        return f"decode_{self.heads}"

    @property
    def rows(self) -> int:
        """Query rows of a CTA, at most; enough for one head with the most new tokens."""
        return -(-max(self.spec.cq - 1 + MAX_NEW_TOKENS, _HEAD_ROWS * self.heads) // 8) * 8

    @property
    def chunks(self) -> int:
        """Chunks of 8 keys in a tile."""
        return self.keys // CHUNK

    @property
    def tokens(self) -> int:
        """New tokens that one convolved tile of 16 rows holds."""
        return 16 // self.chunks

    @property
    def slab_row(self) -> int:
        """Bytes from one row of the slab to the next: an odd number of chunks, for no bank conflicts."""
        return 16 * (self.chunks + window_chunks(self.spec) - 1 | 1)

    @property
    def weights_row(self) -> int:
        """Bytes from one pair's softmax weights to the next's, likewise."""
        return 2 * self.keys + 16

    @property
    def ring_tile(self) -> int:
        """Bytes of a tile of K or V: rows padded by 16 bytes, for no bank conflicts."""
        return self.keys * (2 * max(self.spec.head_dim, self.spec.value_head_dim) + 16)

    def heads_that_fit(self, n_new: int) -> int:
        """Heads of a CTA, at most."""
        return min(self.heads, self.rows // (self.spec.cq - 1 + n_new), self.pairs // n_new)

    @property
    def convolved_tiles(self) -> int:
        """Convolved tiles of a CTA, at most."""
        counts = range(1, MAX_NEW_TOKENS + 1)
        return max(self.heads_that_fit(n_new) * -(-n_new // self.tokens) for n_new in counts)

    @cached_property
    def shared(self) -> SharedMap:
        """The CTA's shared memory; in the end the ring takes every warp's outputs."""
        outputs = self.warps * self.pairs * self.spec.value_head_dim * 4
        return SharedMap.of(
            (
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
        """CTAs that a multiprocessor is to hold: what its shared memory allows, with registers enough for each."""
        by_shared = target.shared_per_multiprocessor // (self.shared.size + RESERVED_SHARED)
        by_registers = target.registers_per_multiprocessor // (_REGISTERS * 32 * self.warps)
        return max(1, min(by_shared, by_registers))

    def registers(self, target: Target) -> int:
        """Registers a thread may have, which the compiler is told by way of ``resident``."""
        share = target.registers_per_multiprocessor // (self.resident(target) * 32 * self.warps)
        return min(target.registers_per_thread, share // 8 * 8)

    def rule(self, target: Target) -> SplitRule:
        """How a sequence is split."""
        return split_rule(self.resident(target), self.keys, target.multiprocessors)


@dataclass(frozen=True)
class TileDecode(TilePass):
    """The decode kernels of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        tiles: its decode kernels, by the number of heads they take.
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
        """Name of the source file."""
        return kernel_name("tile", "decode", self.spec, self.target)

    @property
    def fields(self) -> Fields:
        """The tiles."""
        names = ("heads", "pairs", "warps", "keys", "stages")
        return {"tiles": [{name: getattr(tile, name) for name in names} for tile in self.tiles]}

    @property
    def cost(self) -> float:
        """Multiprocessor cycles per key of one head: those of reading its key and value."""
        target = get_target(self.target)
        bytes_per_key = (self.spec.head_dim + self.spec.value_head_dim) * self.spec.itemsize
        return bytes_per_key / target.dram_bytes_per_cycle

    @property
    def score_exponent(self) -> int:
        """Slabs hold q.k 2^-score_exponent."""
        return SCORE_EXPONENT

    @property
    def scales_queries(self) -> bool:
        """Whether 2^-8 is applied to Q: exact in bf16's range; fp16 scores are scaled one by one."""
        return self.spec.dtype == "bf16"

    @property
    def window_chunks(self) -> int:
        """Chunks that 8 output columns read."""
        return window_chunks(self.spec)

    @property
    def steps(self) -> int:
        """mma's that convolve a tile."""
        return convolution_steps(self.spec)

    @property
    def combine(self) -> Combine:
        """How splits are merged."""
        return Combine(self.spec, self.target, "decode", (BATCH, HEADS, N_NEW), _COMBINE_WARPS)

    @cached_property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(self.spec)

    @property
    def key_begin(self) -> Expr:
        """The first key that some new token sees, in the template's names."""
        return self.mask.begin(_FIRST_POSITION)

    @property
    def split_keys(self) -> Expr:
        """Keys of a cache that are split, at most."""
        return split_keys(self.mask)

    @property
    def masks_windows(self) -> bool:
        """Whether a window holds scores that count for some new tokens and not for others."""
        return self.mask.zeroes_terms and (self.mask.hides_earlier or self.spec.pad_right > 0)

    def resident(self, tile: DecodeTile) -> int:
        """CTAs of a kernel that a multiprocessor is to hold."""
        return tile.resident(get_target(self.target))

    def rule(self, tile: DecodeTile) -> SplitRule:
        """How a kernel's calls are split."""
        return tile.rule(get_target(self.target))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The results, which the host allocates."""
        out = Buffer("out", "q", (BATCH, HEADS, N_NEW, self.spec.value_head_dim))
        return (out, Buffer("lse", "fp32", (BATCH, HEADS, N_NEW)))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The decode kernels and the one that merges splits."""
        arguments = (
            *reads("Element", "q", "k", "v", restrict=False),
            *reads("float", "weight", restrict=False),
            *reads("int", "seqlens", restrict=False, optional=True),
            *writes("Element", "out", restrict=False),
            *writes("float", "lse", "partial", "partial_lse", restrict=False),  # of one split the same memory
            *strides("q", "k", "v"),
            *numbers("int", "n_max", "kv_heads", "group", "n_new", "cta_heads", "num_splits"),
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
        """What the numbers of the source mean."""
        yield "n_max keys a cache, of which seqlens[b] (or all, if null) are in use, the new tokens' included;"
        yield f"q holds the {self.spec.cq - 1} queries before the new ones, then the new ones; cta_heads heads a CTA."
        yield "partial (batch * heads * n_new, num_splits, dv) and partial_lse (log2) are not used for one split."
        yield f"Convolution: {self.steps} mma.m16n8k16 for 16 x 8 scores; outputs lag keys by {self.spec.pad_right}."

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Facts for the plan's table."""
        for tile in self.tiles:
            yield tile.role, "CTA", f"up to {tile.heads} heads, {tile.keys} keys a tile, {tile.warps} warps"
            yield tile.role, "shared memory", f"{tile.shared.size} bytes, {tile.stages} stages"


def window_chunks(spec: Spec) -> int:
    """Chunks of 8 columns that 8 neighbouring outputs read."""
    return -(-(spec.ck + CHUNK - 1) // CHUNK)


def convolution_steps(spec: Spec) -> int:
    """mma's of a convolved tile: a tap is a row shift and a chunk of the window, an mma sums two."""
    return -(-spec.cq * window_chunks(spec) // 2)


def decode_candidates(spec: Spec, target: Target) -> tuple[TileDecode]:
    """The decode kernels: one candidate, for reading keys and values bounds them all.

    Raises:
        PlanError: the shape does not fit; the message names the limit.
    """
    check_supported(spec, target)
    tiles = (_fit(spec, target, *kernel) for kernel in _KERNELS)
    return (TileDecode(spec, target.name, tuple({tile.heads: tile for tile in tiles}.values())),)


def _fit(spec: Spec, target: Target, heads: int, pairs: int, warps: int) -> DecodeTile:
    """The largest tile that lets a multiprocessor hold enough warps, else the largest that fits."""
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
