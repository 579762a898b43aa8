"""Fused split-K decode: the scores of a few queries, convolved on the tensor cores, keys and values read once.

A warp owns a split, a range of keys, and streams it in tiles through a ring of its own in shared memory; warps meet only
to share the queries. A CTA takes several query heads of one key head, each with its last cq - 1 + n_new query rows:

    scores^T [keys, rows] = K Q^T            rows of all heads and of all new tokens, 8 to an mma
    strip    [rows, keys]                    the scores in fp16, behind the last ck - 1 columns of the tile before
    c        [16, 8] += strip x T            16 = (new token, chunk of 8 keys): one row of the strip feeds 8 A rows
    out^T    [dv, pairs] += V^T P^T          a pair is (query head, new token)

The strip being a row of keys, its chunk i, 16 bytes, is row i of an ldmatrix operand, and the operand of the next chunk is
the same one row on. So a tap of the convolution is a (query row, chunk of the window) and an mma sums two taps. Outputs lag
the keys by ``pad_right`` columns, so that a tile's windows end inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...errors import PlanError, explain
from ...spec import MAX_NEW_TOKENS, Spec
from ..decode import SplitRule, split_rule
from ..names import kernel_name
from ..targets import Target, get_target
from .band import CHUNK, band
from .forward import SCORE_EXPONENT, check_supported
from .kernel import Kernel, strides
from .memory import SharedMap

_WIDE_ROWS, _WIDE_PAIRS, _WIDE_HEADS = 48, 16, 8
_TILE_ELEMENTS = 4096  # of K or V in a tile: 8 KiB in flight for each stage of each warp
_STAGES = 3
_COMBINE_WARPS = 4
_RESERVED_REGISTERS = 64  # addresses, loop state, softmax
_BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system takes of each CTA


@dataclass(frozen=True)
class DecodeTile:
    """One decode kernel.

    Attributes:
        spec: the request.
        role: ``decode`` (one head) or ``decode_wide`` (several heads of a group, many new tokens).
        heads: query heads of a CTA, at most.
        rows: query rows of a CTA, at most; a multiple of 8.
        pairs: (query head, new token) pairs of a CTA, at most; a multiple of 8.
        row_tiles: how many 8 rows are multiplied with the keys at a time.
        warps: splits of a CTA.
        keys: keys of a tile.
        stages: tiles, of K and V in turn, in a warp's ring.
    """

    spec: Spec
    role: str
    heads: int
    rows: int
    pairs: int
    row_tiles: int
    warps: int
    keys: int
    stages: int

    @property
    def struct(self) -> str:
        """Its name among the source's constants."""
        return {"decode": "Narrow", "decode_wide": "Wide"}[self.role]

    @property
    def chunks(self) -> int:
        """Chunks of 8 keys in a tile."""
        return self.keys // CHUNK

    @property
    def tokens(self) -> int:
        """New tokens that one convolved tile of 16 rows holds."""
        return 16 // self.chunks

    @property
    def strip_row(self) -> int:
        """Bytes from one row of the strip to the next: an odd number of chunks, for no bank conflicts."""
        return 16 * (self.chunks + -(-(self.spec.ck - 1) // CHUNK) | 1)

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

    def heads_for(self, group: int, n_new: int) -> int:
        """Heads of a CTA: the group shared out evenly among as few CTAs as hold it; 0 if none does."""
        most = self.heads_that_fit(n_new)
        return -(-group // -(-group // most)) if most else 0

    @property
    def convolved_tiles(self) -> int:
        """Convolved tiles of a CTA, at most."""
        counts = range(1, MAX_NEW_TOKENS + 1)
        return max(self.heads_that_fit(n_new) * -(-n_new // self.tokens) for n_new in counts)

    @cached_property
    def shared(self) -> SharedMap:
        """What the CTA's warps share."""
        steps = convolution_steps(self.spec)
        return SharedMap.of(
            (
                ("Q", self.rows * (2 * self.spec.head_dim + 16), 16),
                ("BAND", self.heads * steps * 256, 16),
                ("POSITION", 4 * self.rows, 16),
                ("WARPS_PART", self.warps * self.warp_shared.size, 16),
            )
        )

    @cached_property
    def warp_shared(self) -> SharedMap:
        """What each warp has for itself."""
        return SharedMap.of(
            (
                ("RING", self.stages * self.ring_tile, 16),
                ("STRIP", self.rows * self.strip_row, 16),
                ("P", self.pairs * self.weights_row, 16),
                ("PEAK", 4 * self.pairs, 16),
                ("SUM", 256 * self.convolved_tiles, 16),
            )
        )

    @property
    def registers(self) -> int:
        """Estimate: O, the scores, their operands."""
        accumulators = self.spec.value_head_dim * self.pairs // 32 + self.keys * self.row_tiles // 4
        return min(255, accumulators + 2 * self.row_tiles + _RESERVED_REGISTERS)

    def rule(self, target: Target) -> SplitRule:
        """How many CTAs a sequence is split among."""
        resident = min(
            target.shared_per_multiprocessor // (self.shared.size + _BLOCK_OVERHEAD),
            target.registers_per_multiprocessor // (self.registers * 32 * self.warps),
        )
        return split_rule(resident, self.warps * self.keys, target.multiprocessors)


@dataclass(frozen=True)
class FusedDecode:
    """The decode kernels of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        tiles: narrow, then wide.
    """

    spec: Spec
    target: str
    tiles: tuple[DecodeTile, ...]
    template: str = "decode.cu.j2"

    @property
    def name(self) -> str:
        """Name of the source file."""
        return kernel_name("decode", self.spec, self.target)

    @property
    def score_exponent(self) -> int:
        """Strips hold q.k 2^-score_exponent."""
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
    def combine_warps(self) -> int:
        """Warps that merge the splits of one row."""
        return _COMBINE_WARPS

    @property
    def masks_windows(self) -> bool:
        """Whether a score counts for some new tokens and not for others."""
        return self.spec.causal and self.spec.mask == "output" and self.spec.pad_right > 0

    def tile_for(self, group: int, n_new: int) -> DecodeTile:
        """The kernel for one call."""
        fits = group == 1 and self.tiles[0].heads_for(group, n_new)
        return self.tiles[0] if fits else self.tiles[1]

    def splits_for(self, tile: DecodeTile, owners: int, keys: int) -> int:
        """Splits of each of ``owners`` sequences of at most ``keys`` keys."""
        rule = tile.rule(get_target(self.target))
        return min(tile.warps * rule.splits(owners, keys), max(1, keys // (rule.min_keys // tile.warps)))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The two decode kernels and the one that merges splits."""
        arguments = (
            *(("pointer", name) for name in ("q", "k", "v", "weight", "seqlens", "out", "lse", "partial", "partial_lse")),
            *strides("q", "k", "v"),
            *(("int", name) for name in ("n_max", "kv_heads", "group", "n_new", "cta_heads", "num_splits")),
            ("float", "scale"),
        )
        grid = "batch * kv_heads * ceil(num_splits / {}) * ceil(group / cta_heads)"
        decode = (
            Kernel(
                tile.role,
                kernel_name(tile.role, self.spec, self.target),
                arguments,
                grid.format(tile.warps),
                32 * tile.warps,
                tile.shared.size,
                tile.registers,
            )
            for tile in self.tiles
        )
        combine = Kernel(
            "combine",
            kernel_name("decode_combine", self.spec, self.target),
            (*(("pointer", name) for name in ("partial", "partial_lse", "out", "lse")), ("int", "num_splits")),
            "batch * heads * n_new",
            32 * _COMBINE_WARPS,
            0,
            64,
        )
        return (*decode, combine)

    @property
    def legend(self) -> Iterator[str]:
        """What the numbers of the source mean."""
        yield "n_max keys a cache, of which seqlens[b] (or all, if null) are in use, the n_new newest tokens' included;"
        yield f"q holds the {self.spec.cq - 1} queries before the new ones, then the new ones; cta_heads heads a CTA."
        yield "partial (batch * heads * n_new, num_splits, dv) and partial_lse (units of log2) are not read for one split."
        yield f"Convolution: {self.steps} mma.m16n8k16 for 16 x 8 scores; outputs lag the keys by {self.spec.pad_right}."

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Facts for the plan's table."""
        for tile in self.tiles:
            yield tile.role, "CTA", f"{tile.warps} splits, {tile.rows} query rows, {tile.pairs} outputs, {tile.keys} keys a tile"
            yield tile.role, "shared memory", f"{tile.shared.size} bytes, {tile.stages} stages"


def window_chunks(spec: Spec) -> int:
    """Chunks of 8 columns that 8 neighbouring outputs read."""
    return -(-(spec.ck + CHUNK - 1) // CHUNK)


def convolution_steps(spec: Spec) -> int:
    """mma's of a convolved tile: a tap is a row shift and a chunk of the window, an mma sums two."""
    return -(-spec.cq * window_chunks(spec) // 2)


def fused_decode(spec: Spec, target: Target) -> FusedDecode:
    """Plan the decode kernels.

    Raises:
        PlanError: the shape does not fit; the message names the limit.
    """
    check_supported(spec, target)
    band(spec.cq, spec.ck)  # the same limits
    return FusedDecode(spec, target.name, (_narrow(spec, target), _wide(spec, target)))


def _narrow(spec: Spec, target: Target) -> DecodeTile:
    rows = -(-spec.cq // 8) * 8
    return _fit(target, [DecodeTile(spec, "decode", 1, rows, 8, rows // 8, 1, _keys(spec), _STAGES)])


def _wide(spec: Spec, target: Target) -> DecodeTile:
    return _fit(
        target,
        [
            DecodeTile(spec, "decode_wide", heads, rows, _WIDE_PAIRS, 3, warps, _keys(spec), _STAGES)
            for heads, rows in ((_WIDE_HEADS, _WIDE_ROWS), (_WIDE_HEADS // 2, _WIDE_ROWS // 2))
            for warps in (4, 2, 1)
        ],
    )


def _keys(spec: Spec) -> int:
    """Keys of a tile: the same number of bytes for every head_dim."""
    widest = max(spec.head_dim, spec.value_head_dim)
    return next(keys for keys in (64, 32, 16) if keys * widest <= _TILE_ELEMENTS)


def _fit(target: Target, candidates: list[DecodeTile]) -> DecodeTile:
    """The first candidate that fits the target's shared memory."""
    for tile in candidates:
        if tile.shared.size <= target.shared_per_block:
            return tile
    rule = f"{target.name} has {target.shared_per_block} bytes of shared memory, decode needs {tile.shared.size}"
    raise PlanError(explain("head_dim", tile.spec.head_dim, rule, "a smaller head_dim, or backend='triton'"))
