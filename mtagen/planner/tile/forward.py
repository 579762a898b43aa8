"""Plan of the fused forward pass: a CTA owns rows of queries and streams tiles of keys and values.

A warp holds 16 or 32 rows of scores in registers and writes them to a score tile in shared memory
("slab" in names). It convolves its rows of the score tile, with the cq-1 rows above them, on the
tensor cores. So a CTA of R rows yields R - (cq-1) rows of outputs, and its first cq-1 rows are halo
only. There is no halo along the keys: the score tile keeps the last ``carry`` columns of the tile
before, and outputs lag the keys by ``lag`` columns, so that every window starts on a chunk of the
score tile.

With a single tap, scores stay in their registers, and there is no score tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product

from sympy import Expr, Integer, Min, ceiling, floor, symbols

from ...errors import PlanError, explain
from ...spec import DROPOUT_GROUP, Spec
from ..geometry.affine import N_K, N_Q
from ..geometry.mask import Mask
from ..kernel import Argument, Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..sizes import BATCH, HEADS, SPLITS
from ..splits import SplitRule, split_rule
from ..targets import RESERVED_SHARED, SHARED_BYTES_PER_CYCLE, Target, get_target
from .combine import Combine
from .dropout_bits import DRAW, KEEP_SCALE, DropoutBits
from .layout import LAYERS
from .memory import SharedMap
from .passes import TilePass
from .sections import Sections
from .supported import check_supported
from .toeplitz import CHUNK, SCORE_EXPONENT, Toeplitz, toeplitz
from .wgmma import Wgmma

# Names in the templates for a CTA's work: its first row, the number of rows from it on, and its split of the keys.
FIRST, FIRST_ROWS, OFFSET = symbols("first rows offset", integer=True)
SPLIT, SPLIT_TILES = symbols("split split_tiles", integer=True, nonnegative=True)
# Registers that computing threads give to those that draw dropout masks (benchmarks/notes/data.md, "Dropout").
_SPARED_REGISTERS = 8
_RESERVED_REGISTERS = {True: 18, False: 50}  # addresses, loop state, softmax state; without wgmma, A and B operands too
# The cost model, in cycles of a multiprocessor.
_SOFTMAX = 0.06  # work outside the tensor cores, per score
_STEP_LATENCY = 1200  # latency of a step that other warps do not hide
_COMBINE_WARPS = 1  # warps that share the splits of a row


@dataclass(frozen=True)
class TileForward(TilePass):
    """The forward kernel of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        hopper: whether the kernel uses wgmma and warp specialisation (sm_90a); otherwise mma.sync
            (sm_80 and later).
        warps: number of computing warps.
        keys: keys of a tile.
        stages: tiles of K and of V in shared memory.
        query_fragments: number of Q's head_dim / 16 fragments that stay in registers: all, or none.
        row_tiles: tiles of 16 rows per warp.
        blocks: resident CTAs per multiprocessor.
    """

    spec: Spec
    target: str
    hopper: bool
    warps: int
    keys: int
    stages: int
    query_fragments: int
    row_tiles: int = 1
    blocks: int = 1

    pass_name = "forward"
    counts_heads = False  # of the grid, as the backward pass does
    role = "forward"

    @classmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TileForward]:
        return forward_candidates(spec, target)

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score that counts."""
        dims, target = self.spec.head_dim + self.spec.value_head_dim, get_target(self.target)
        rate = target.tensor_flop_per_cycle if self.hopper else target.mma_flop_per_cycle
        products, convolution = 2 * dims / rate, 32 * self.toeplitz.mma_of_scores / target.mma_flop_per_cycle
        loads = 0 if self.hopper else 2 * dims / (16 * self.row_tiles) / SHARED_BYTES_PER_CYCLE  # a fragment per tile
        waits = _STEP_LATENCY / (self.blocks * self.rows * self.keys)
        return (products + convolution + loads + _SOFTMAX + waits) * self.rows / self.owned

    @property
    def name(self) -> str:
        """The name of the source file and of its kernel."""
        return kernel_name("tile", "fwd", self.spec, self.target)

    @cached_property
    def split(self) -> SplitForward | None:
        """The kernel for calls whose keys are split, if there is one.

        There is none for packed documents, whose blocks come from a schedule, and none with
        dropout, whose groups of keys a split would have to begin with.
        """
        if self.spec.packed or self.spec.dropout:
            return None
        return SplitForward(**{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def cuda(self) -> Mapping[str, TilePass]:
        return {kernel.role: kernel for kernel in (self, self.split) if kernel}

    @property
    def template(self) -> str:  # type: ignore[override]
        """The kernel's template."""
        return "forward_sm90.cu.j2" if self.hopper else "forward_sm80.cu.j2"

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution."""
        return toeplitz(self.spec.cq, self.spec.ck)

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    @property
    def key_end(self) -> Expr:
        """End of the keys that any of a CTA's first ``rows`` rows sees, in the templates' names."""
        last = self.mask.last_key(FIRST + FIRST_ROWS - 1 + OFFSET)
        return N_K if last is None else Min(N_K, last + 1)

    @property
    def warpgroups_leave(self) -> bool:
        """Whether a warpgroup leaves the key loop after the last keys that its own rows see.

        The next warpgroup then reads zeros for the rows of the one that left. That is right if a
        convolution counts hidden scores as zeros, but not if the row of the output decides which
        terms are hidden. The others go on for no more tiles than are loaded ahead, so that none
        waits for the warpgroup that left. Two warpgroups gain less than three, so only three leave.
        With dropout, and with a single tap, the last steps would spill registers.
        """
        zeros = self.mask.hides_later and not self.mask.zeroes_terms
        ahead = 16 * (self.warps - 4) <= self.stages * self.keys
        fits = self.slabs > 0 and not self.dropout_bits
        return self.hopper and zeros and ahead and fits and self.warps == 12

    @property
    def key_begin(self) -> Expr:
        """First key of a CTA's key loop, in the templates' names: the beginning of a chunk or
        dropout group.
        """
        begin = self.mask.begin(FIRST + self.halo + N_K - N_Q - self.spec.pad_left)
        multiple = DROPOUT_GROUP if self.spec.dropout else CHUNK
        return multiple * floor(begin / multiple)

    @property
    def score_exponent(self) -> int:
        """Exponent of the scale of scores: score tiles hold q.k 2^-exponent, registers hold q.k."""
        return 0 if self.toeplitz.pointwise else SCORE_EXPONENT

    @property
    def rows(self) -> int:
        """Number of rows of scores that a CTA computes."""
        return 16 * self.row_tiles * self.warps

    @property
    def halo(self) -> int:
        """Number of rows above a row that its output reads."""
        return self.spec.cq - 1

    @cached_property
    def owned(self) -> int:
        """Number of rows of outputs that a CTA computes."""
        return self.rows - self.halo

    @property
    def lag(self) -> int:
        """Columns by which outputs lag the tiles, so that a window starts on a chunk, ``carry``
        before its tile.
        """
        return self.toeplitz.carry - self.spec.pad_left + self.leading_keys

    @property
    def leading_keys(self) -> int:
        """Keys by which tiles begin before the first key, so that outputs begin with a dropout
        group.
        """
        return (self.spec.pad_left - self.toeplitz.carry) % DROPOUT_GROUP if self.spec.dropout else 0

    @property
    def tiles(self) -> int:
        """Number of output tiles of 8 columns in a tile of keys."""
        return self.keys // CHUNK

    @property
    def slabs(self) -> int:
        """Number of score tiles.

        With two a warp writes the next tile's scores while others read this one's.
        """
        return 0 if self.toeplitz.pointwise else 2 if self.hopper else 1

    @property
    def pad(self) -> int:
        """Rows of zeros before a score tile's first row; even, to keep parities.

        The last cq-1 are the halo.
        """
        return -(-self.halo // 2) * 2

    @property
    def slab_chunks(self) -> int:
        """Number of chunks of a score tile's row that windows read whole."""
        return self.tiles + self.toeplitz.chunks - 1

    @property
    def slab_row(self) -> int:
        """Bytes from a row of a score tile to the next of its parity; an odd chunk avoids bank
        conflicts.
        """
        return 16 * (self.slab_chunks | 1)

    @property
    def slab_parity(self) -> int:
        """Bytes of a score tile's rows of one parity."""
        return (self.rows + self.pad) // 2 * self.slab_row

    @property
    def gather_tile(self) -> int:
        """Bytes of a tile's gathered columns, one word per row."""
        return 4 * (self.pad + self.rows + 2) if self.toeplitz.gathers else 0

    @property
    def carry_chunks(self) -> int:
        """Number of chunks of the tile before at the beginning of a score tile."""
        return self.toeplitz.carry // CHUNK

    @property
    def panels(self) -> tuple[int, int]:
        """Numbers of panels of 64 columns of (Q and K, V) in shared memory."""
        return -(-self.spec.head_dim // 64), -(-self.spec.value_head_dim // 64)

    @property
    def scales_queries(self) -> bool:
        """Whether Q is scaled by 2^-8, which is exact in bf16.

        With fp16 the scores are scaled one by one.
        """
        return self.spec.dtype == "bf16" and not self.toeplitz.pointwise

    @property
    def masks_scores(self) -> bool:
        """Whether hidden scores are set to zero.

        With a single tap they only reach hidden outputs.
        """
        return self.mask.zeroes_scores and not self.toeplitz.pointwise

    @property
    def scales_scores(self) -> bool:
        """Whether scores are scaled by 2^-8, because Q is not."""
        return self.score_exponent > 0 and not self.scales_queries

    @cached_property
    def dropout_bits(self) -> DropoutBits | None:
        """The dropout masks of the tiles in flight, which on Hopper producer warps draw as they
        load.
        """
        return DropoutBits(self.rows, self.keys, self.keys, 1, True, self.stages) if self.spec.dropout else None

    @property
    def tap_bytes(self) -> int:
        """Bytes of a head's weights."""
        return 4 * self.spec.cq * self.spec.ck

    @cached_property
    def shared(self) -> SharedMap:
        """The map of the CTA's shared memory."""
        barriers = 8 * (4 * self.stages + 4 * self.warps) if self.hopper else 0
        k_panels, v_panels = self.panels
        return SharedMap.of(
            (
                ("Q", k_panels * self.rows * 128, 1024),
                ("K", self.stages * k_panels * self.keys * 128, 1024),
                ("V", self.stages * v_panels * self.keys * 128, 1024),
                ("SLAB", self.slabs * 2 * self.slab_parity, 16),
                ("GATHER", self.slabs * self.tiles * self.gather_tile, 16),
                ("DROPOUT", self.dropout_bits.size if self.dropout_bits else 0, 4),
                ("TAPS", self.warps // 4 * self.tap_bytes if self.hopper else 0, 4),  # one copy per warpgroup
                ("BARRIERS", barriers, 8),
            )
        )

    @property
    def threads(self) -> int:
        """Number of threads of a CTA, on Hopper with those of the producer warpgroup."""
        return 32 * self.warps + (128 if self.hopper else 0)

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers of a thread of a computing warpgroup, and of the producer warpgroup."""
        if self.hopper:
            # Drawing dropout masks takes more registers than loading.
            drawing = {1: (240, 56), 2: (224, 56), 3: (160 - _SPARED_REGISTERS, 56)}
            return (drawing if self.spec.dropout else {1: (240, 24), 2: (240, 24), 3: (160, 32)})[self.warps // 4]
        target = get_target(self.target)
        return min(target.registers_per_thread, target.registers_per_multiprocessor // (self.threads * self.blocks)), 0

    @property
    def spared_registers(self) -> int:
        """Registers that a computing thread gives to producer threads that draw masks.

        It may spill as many.
        """
        return _SPARED_REGISTERS if self.dropout_bits and self.hopper else 0

    @property
    def registers(self) -> int:
        """Estimated registers of a computing thread: O, scores, on Hopper also convolved scores, B
        operands, Q.
        """
        accumulators = self.spec.value_head_dim // 2 + (2 if self.hopper else 1) * (self.keys // 2)
        tiles = self.row_tiles * (accumulators + 4 * self.query_fragments)
        return tiles + (0 if self.toeplitz.pointwise else self.toeplitz.registers) + _RESERVED_REGISTERS[self.hopper]

    @property
    def wgmmas(self) -> tuple[Wgmma, ...]:
        """The warpgroup products."""
        dtype = self.spec.dtype
        scores = Wgmma("wgmma_scores", self.keys, dtype, a_in_registers=self.query_fragments > 0)
        values = Wgmma("wgmma_values", self.spec.value_head_dim, dtype, a_in_registers=True, b_transposed=True)
        return scores, values

    @property
    def results(self) -> tuple[Argument, ...]:
        """Pointers to the kernel's results."""
        return (*writes("Element", "out"), *writes("float", "lse"))

    @property
    def head_tiles(self) -> Expr:
        """Number of output tiles (blocks of rows) of a head."""
        return self.layout.blocks(self.layout.queries, self.owned)

    @property
    def sections(self) -> Sections | None:
        """The sections of heads whose CTAs share L2;

        None except for batches on sm_90a, where it was measured.
        """
        if not self.hopper or self.layout.packed or self.mask.hides_earlier:
            return None
        return Sections(BATCH * HEADS, 4, N_K, self.spec.head_dim, self.head_tiles)

    @property
    def layers(self) -> Expr | None:
        """Number of layers along z of output tiles, which lie along y;

        None if z has another use.
        """
        return None if self.sections else self.layout.layers(self.head_tiles)

    @property
    def has_spare_tiles(self) -> bool:
        """Whether layers may have more output tiles than a head; a schedule of documents says which
        exist.
        """
        return self.layers is not None and not self.layout.packed

    @property
    def reverses_tiles(self) -> bool:
        """Whether CTAs take the last output tiles first, which see the most keys.

        Schedules of documents have an order of their own.
        """
        return self.mask.favours_later_rows and not self.layout.packed

    @property
    def counts_tiles(self) -> bool:
        """Whether CTAs need the number of a head's output tiles in the grid."""
        return self.reverses_tiles

    @property
    def grid(self) -> tuple[Expr, ...]:
        """The grid: a CTA for each output tile of each head."""
        if self.sections:
            return self.sections.grid
        return self.layout.batch * HEADS, ceiling(self.head_tiles / LAYERS), LAYERS

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel of the pass."""
        layout = self.layout
        arguments = (
            *reads("Element", "q", "k", "v"),
            *reads("float", "weight"),
            *layout.documents,
            *self.results,
            *layout.strides("q", "k", "v"),
            *layout.lengths,
            *numbers("int", *(("total_q",) if layout.packed else ()), "heads", "group"),
            *numbers("float", "scale"),
            *((*DRAW, *KEEP_SCALE) if self.spec.dropout else ()),
        )
        registers = max(self.register_split)
        return (Kernel(self.role, self.name, arguments, self.grid, self.threads, self.shared.size, registers),)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the host allocates."""
        out = Buffer("out", "q", self.layout.outputs(self.spec.value_head_dim))
        return (out, Buffer("lse", "fp32", self.layout.statistics))

    @property
    def tile_order(self) -> str:
        """The order in which CTAs take blocks of documents (``templates/host/documents.py``): long
        ones first.
        """
        return "later" if self.mask.favours_later_rows else "longest"

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment that explain its numbers."""
        yield f"A CTA computes {self.rows} rows of scores, yields {self.owned}, and streams tiles of {self.keys} keys."
        if not self.toeplitz.pointwise:
            carried = f"a score tile starts with {self.toeplitz.carry} columns of the tile before"
            yield f"Output columns lag the keys by {self.lag}; {carried}."
            yield f"Convolution: {self.toeplitz.mma_of_scores} mma.m16n8k16 for 16 x 8 scores."
        yield from self.layout.legend(self.owned, "queries")
        if self.sections:
            yield from self.sections.legend

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Yield facts for the plan's table."""
        yield from self.kernel_rows()
        if self.split:
            rule = self.split.rule
            yield "forward", "splits of the keys", f"for up to {rule.slots} CTAs, of {rule.min_keys} keys or more"

    def kernel_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the facts about the kernel without splits."""
        yield (
            "forward",
            "CTA",
            f"{self.rows} rows ({self.owned} owned), {self.keys} keys a tile, {self.threads} threads",
        )
        yield (
            "forward",
            "convolution",
            "one factor"
            if self.toeplitz.pointwise
            else f"{self.toeplitz.mma_of_scores} mma of 16 x 8 x 16, lag {self.lag}, carry {self.toeplitz.carry}",
        )
        yield "forward", "shared memory", f"{self.shared.size} bytes"


@dataclass(frozen=True)
class SplitForward(TileForward):
    """The forward kernel for CTAs that take a split of the keys, and the kernel that merges splits.

    A split streams ``split_tiles`` tiles; the last split streams the rest. A split begins ``carry``
    keys before the end of the split before, and computes each output whose window begins in its
    keys.
    """

    role = "forward_split"
    splits = True

    @property
    def name(self) -> str:
        """The name of the source file and of its kernel."""
        return kernel_name("tile", "fwd_split", self.spec, self.target)

    @property
    def key_begin(self) -> Expr:
        """First key of a CTA's key loop, in the templates' names."""
        return super().key_begin + SPLIT * (SPLIT_TILES * self.keys - self.toeplitz.carry)

    @property
    def repeated_columns(self) -> int:
        """Columns of a later split's first tile that the split before outputs, because their
        windows begin there.
        """
        return self.spec.pad_left

    @property
    def visible_keys(self) -> Expr:
        """Number of keys that the splits of a block of rows share, in names of the host and of the
        templates.

        If a window begins within a chunk, a few more keys may be visible. The last split takes them
        with the rest.
        """
        if self.mask.left is None or self.mask.right is None:
            return N_K
        return Min(N_K, self.rows + self.spec.pad_left + self.mask.left + self.mask.right)

    @property
    def split_tiles(self) -> Expr:
        """Number of tiles of keys that a split streams, in the templates' names."""
        return ceiling((self.visible_keys + self.toeplitz.carry * SPLITS) / (self.keys * SPLITS))

    @property
    def ctas_and_slots(self) -> tuple[Expr, Expr]:
        """The number of CTAs of a call that is not split, and the number of CTAs that fit the GPU
        at once.

        If later rows see more keys, some splits have none. If a fraction h of the keys is hidden
        from the mean row, the n splits of a block of rows are n (1 - h) + h CTAs with keys. So a
        CTA counts as 1 - h CTAs, and h slots are subtracted for each. Both numbers are multiplied
        by 2 n_k, which makes them integers.
        """
        n_q, n_k = symbols("n_q n_k", integer=True, positive=True)  # positive: a launch has queries and keys
        ctas, slots = BATCH * HEADS * ceiling(n_q / self.owned), self.rule.slots
        if not self.mask.favours_later_rows:
            return ctas, Integer(slots)
        hidden = Min(n_q, n_k)  # 2 n_k h
        return ctas * (2 * n_k - hidden), 2 * n_k * slots - ctas * hidden

    @property
    def sections(self) -> None:
        """None, because only calls that do not fill the GPU are split."""
        return None

    @property
    def layers(self) -> None:
        """None, because calls that do not fill the GPU have few output tiles."""
        return None

    @property
    def rule(self) -> SplitRule:
        """The rule for the number of splits: they fill the GPU once; a call that fills it is not
        split.
        """
        return split_rule(self.blocks, self.keys, get_target(self.target).multiprocessors, max_waves=1)

    @property
    def combine(self) -> Combine:
        """The merging of splits."""
        return Combine(self.spec, self.target, "fwd", self.layout.statistics, _COMBINE_WARPS)

    @property
    def results(self) -> tuple[Argument, ...]:
        """Pointers to the kernel's results."""
        return writes("float", "partial", "partial_lse")

    @property
    def grid(self) -> tuple[Expr, ...]:
        """The grid: a CTA for each split of each output tile."""
        return BATCH * HEADS, self.head_tiles, SPLITS

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel and the one that merges splits."""
        return (*super().kernels, self.combine.kernel)

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment that explain its numbers."""
        yield from super().legend
        yield "partial (batch * heads * n_q, splits, dv) and partial_lse (log2) are the results of splits of the keys."


def forward_candidates(spec: Spec, target: Target) -> list[TileForward]:
    """Return the plans of the fused forward pass that fit registers and shared memory.

    Raises:
        PlanError: no plan fits; the message names the limit.
    """
    check_supported(spec, target)
    fitting = []
    for candidate in _candidates(spec, target):
        blocks = candidate.blocks
        shared = min(target.shared_per_block, target.shared_per_multiprocessor // blocks - RESERVED_SHARED)
        if (
            candidate.shared.size <= shared
            and candidate.registers <= candidate.register_split[0] + candidate.spared_registers
        ):
            fitting.append(candidate)
    if fitting:
        return fitting
    rule = (
        f"the smallest forward tile needs {candidate.shared.size} bytes of shared memory and about "
        f"{candidate.registers} registers a thread; {target.name} has {shared} and {candidate.register_split[0]}"
    )
    raise PlanError(explain("head_dim", spec.head_dim, rule, "a smaller head_dim, or backend='triton'"))


def _candidates(spec: Spec, target: Target) -> Iterator[TileForward]:
    """Yield candidates from most to least work per CTA."""
    fragments = spec.head_dim // 16
    if "wgmma" in target.matrix:
        wide = (128,) if toeplitz(spec.cq, spec.ck).pointwise else ()  # fits if there is no score tile
        for warpgroups, keys in product((3, 2, 1), (*wide, 64, 32)):
            for in_registers in (fragments, 0) if fragments <= 4 else (0,):
                yield TileForward(spec, target.name, True, 4 * warpgroups, keys, 2, in_registers)
    else:
        # Two row tiles per warp halve the reads of K and V; a second CTA hides the latencies of the first.
        two_tiles = [(4, keys, 2, 2) for keys in (64, 48, 32)]
        one_tile = [(warps, keys, 1, 1) for warps in (8, 4) for keys in (64, 48, 32)]
        for warps, keys, row_tiles, blocks in (*two_tiles, *one_tile):
            in_registers = fragments if fragments * row_tiles <= 8 and spec.value_head_dim <= 128 else 0
            yield TileForward(spec, target.name, False, warps, keys, 1, in_registers, row_tiles, blocks)
