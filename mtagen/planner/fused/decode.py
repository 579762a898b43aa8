"""Fused split-K decode: the scores of a few queries, convolved on the tensor cores, keys and values read once.

A CTA owns a split, a range of keys, and streams it in tiles of K and V through a ring. A warp takes some keys of each tile
and some of the query heads that share them, each head with its last cq - 1 + n_new query rows:

    scores^T [keys, rows] = K Q^T            rows of all the warp's heads and of all new tokens, 8 to an mma
    strip    [rows, keys]                    the scores in fp16, behind the last ck - 1 columns of the tile before
    c        [16, 8] += strip x T            16 = (new token, chunk of 8 keys)
    out^T    [dv, 8] += V^T P^T              8 pairs (query head, new token)

A chunk of the strip, 8 keys in 16 bytes, is a row of an ldmatrix operand, and the operand one chunk on is the same a row
further. So a tap of the convolution is a (query row, chunk of the window), and an mma sums two taps. Outputs lag the keys
by ``pad_right`` columns, so that a tile's windows end inside it.
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

PAIRS = 8  # (query head, new token) outputs of a warp: the columns of one mma
_WIDE = ((2, 2, 4), (2, 2, 2), (1, 2, 2), (1, 1, 1))  # key warps, head warps, heads a warp: the first that fits
_TILE_ELEMENTS = 4096  # of K or V in a tile: 8 KiB
_STAGES = 3
_COMBINE_WARPS = 4
_RESERVED_REGISTERS = 64  # addresses, loop state, softmax
_BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system takes of each CTA


@dataclass(frozen=True)
class DecodeTile:
    """One decode kernel.

    Attributes:
        spec: the request.
        role: ``decode`` (one head) or ``decode_wide`` (heads that share their keys).
        key_warps: warps that share out the keys of a tile.
        head_warps: warps, for each of those, that share out the heads.
        heads: query heads of a warp, at most.
        row_tiles: query rows of a warp, at most, by 8.
        keys: keys of a tile for a warp.
        stages: tiles, of K and V in turn, in the ring.
    """

    spec: Spec
    role: str
    key_warps: int
    head_warps: int
    heads: int
    row_tiles: int
    keys: int
    stages: int

    @property
    def struct(self) -> str:
        """Its name among the source's constants."""
        return {"decode": "Narrow", "decode_wide": "Wide"}[self.role]

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.key_warps * self.head_warps

    @property
    def rows(self) -> int:
        """Query rows of a warp, at most."""
        return 8 * self.row_tiles

    @property
    def tile_keys(self) -> int:
        """Keys of a tile."""
        return self.key_warps * self.keys

    @property
    def chunks(self) -> int:
        """Chunks of 8 keys in a warp's part of a tile."""
        return self.keys // CHUNK

    @property
    def tokens(self) -> int:
        """New tokens that one convolved tile of 16 rows holds."""
        return 16 // self.chunks

    @property
    def strip_row(self) -> int:
        """Bytes from one row of the strip to the next: an odd number of chunks, for no bank conflicts."""
        return 16 * (self.tile_keys // CHUNK + window_chunks(self.spec) - 1 | 1)

    @property
    def weights_row(self) -> int:
        """Bytes from one pair's softmax weights to the next's, likewise."""
        return 2 * self.keys + 16

    @property
    def ring_tile(self) -> int:
        """Bytes of a tile of K or V: rows padded by 16 bytes, for no bank conflicts."""
        return self.tile_keys * (2 * max(self.spec.head_dim, self.spec.value_head_dim) + 16)

    def heads_that_fit(self, n_new: int) -> int:
        """Heads of a warp, at most."""
        return min(self.heads, self.rows // (self.spec.cq - 1 + n_new), PAIRS // n_new)

    def heads_for(self, group: int, n_new: int) -> int:
        """Heads of a warp: the group shared out evenly among as few CTAs as hold it."""
        blocks = -(-group // (self.head_warps * self.heads_that_fit(n_new)))
        return -(-group // (blocks * self.head_warps))

    @property
    def convolved_tiles(self) -> int:
        """Convolved tiles of a warp, at most."""
        counts = range(1, MAX_NEW_TOKENS + 1)
        return max(self.heads_that_fit(n_new) * -(-n_new // self.tokens) for n_new in counts)

    @cached_property
    def shared(self) -> SharedMap:
        """The CTA's shared memory; in the end the ring takes every warp's outputs."""
        outputs = self.warps * PAIRS * self.spec.value_head_dim * 4
        return SharedMap.of(
            (
                ("RING", max(self.stages * self.ring_tile, outputs), 16),
                ("HEAD_WARP", self.head_warps * self.head_shared.size, 16),
                ("WARP", self.warps * self.warp_shared.size, 16),
            )
        )

    @cached_property
    def head_shared(self) -> SharedMap:
        """What the warps of the same heads share."""
        return SharedMap.of(
            (
                ("Q", self.rows * (2 * self.spec.head_dim + 16), 16),
                ("BAND", self.heads * convolution_steps(self.spec) * 256, 16),
                ("STRIP", self.rows * self.strip_row, 16),
                ("POSITION", 4 * self.rows, 16),
            )
        )

    @cached_property
    def warp_shared(self) -> SharedMap:
        """What each warp has for itself."""
        return SharedMap.of(
            (
                ("P", PAIRS * self.weights_row, 16),
                ("SUM", 256 * self.convolved_tiles, 16),
                ("PEAK", 4 * PAIRS, 16),
                ("TOTAL", 4 * PAIRS, 16),
            )
        )

    @property
    def registers(self) -> int:
        """Estimate: O, the scores, their operands."""
        accumulators = self.spec.value_head_dim // 4 + self.keys * self.row_tiles // 4
        return min(255, accumulators + _RESERVED_REGISTERS)

    def rule(self, target: Target) -> SplitRule:
        """How a sequence is split."""
        resident = min(
            target.shared_per_multiprocessor // (self.shared.size + _BLOCK_OVERHEAD),
            target.registers_per_multiprocessor // (self.registers * 32 * self.warps),
        )
        return split_rule(resident, self.tile_keys, target.multiprocessors)


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

    def tile_for(self, group: int) -> DecodeTile:
        """The kernel for one call."""
        return self.tiles[group > 1]

    def splits_for(self, tile: DecodeTile, owners: int, keys: int) -> int:
        """Splits of each of ``owners`` sequences of at most ``keys`` keys."""
        return tile.rule(get_target(self.target)).splits(owners, keys)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The two decode kernels and the one that merges splits."""
        arguments = (
            *(
                ("pointer", name)
                for name in ("q", "k", "v", "weight", "seqlens", "out", "lse", "partial", "partial_lse")
            ),
            *strides("q", "k", "v"),
            *(("int", name) for name in ("n_max", "kv_heads", "group", "n_new", "warp_heads", "num_splits")),
            ("float", "scale"),
        )
        grid = "batch * kv_heads * num_splits * ceil(group / ({} warp_heads))"
        decode = (
            Kernel(
                tile.role,
                kernel_name(tile.role, self.spec, self.target),
                arguments,
                grid.format(tile.head_warps),
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
        yield f"q holds the {self.spec.cq - 1} queries before the new ones, then the new ones; warp_heads heads a warp."
        yield "partial (batch * heads * n_new, num_splits, dv) and partial_lse (units of log2) are not read for one split."
        yield f"Convolution: {self.steps} mma.m16n8k16 for 16 x 8 scores; outputs lag the keys by {self.spec.pad_right}."

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Facts for the plan's table."""
        for tile in self.tiles:
            yield tile.role, "CTA", f"{tile.key_warps} x {tile.head_warps} warps of {tile.keys} keys, {tile.heads} heads"
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
    rows = -(-(spec.cq - 1 + MAX_NEW_TOKENS) // 8)  # of one head with the most new tokens
    widest = max(spec.head_dim, spec.value_head_dim)
    keys = next(keys for keys in (64, 32, 16) if keys * widest <= _TILE_ELEMENTS)
    narrow = [DecodeTile(spec, "decode", warps, 1, 1, rows, keys, _STAGES) for warps in (4, 2, 1)]
    wide = [
        DecodeTile(spec, "decode_wide", key_warps, head_warps, heads, max(rows, 3), keys, _STAGES)
        for key_warps, head_warps, heads in _WIDE
    ]
    return FusedDecode(spec, target.name, (_fit(target, narrow), _fit(target, wide)))


def _fit(target: Target, candidates: list[DecodeTile]) -> DecodeTile:
    """The first candidate that fits the target's shared memory."""
    for tile in candidates:
        if tile.shared.size <= target.shared_per_block:
            return tile
    rule = f"{target.name} has {target.shared_per_block} bytes of shared memory, decode needs {tile.shared.size}"
    raise PlanError(explain("head_dim", tile.spec.head_dim, rule, "a smaller head_dim, or backend='triton'"))
