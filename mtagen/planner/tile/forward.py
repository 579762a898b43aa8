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

from sympy import Expr, Integer, Min, ceiling, symbols

from ...errors import PlanError, explain
from ...spec import Spec
from ..cuda.score import parameters, score_function, sink
from ..cuda.toeplitz import Toeplitz, toeplitz
from ..cuda.wgmma import Wgmma
from ..geometry.affine import N_K
from ..geometry.mask import Mask
from ..geometry.score import SCORE, ScoreStage
from ..kernel import Argument, Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..sizes import BATCH, HEADS, SPLITS
from ..splits import SplitRule, split_rule
from ..targets import SHARED_BYTES_PER_CYCLE, Target, get_target
from .combine import Combine
from .dropout_bits import DRAW, KEEP_SCALE, DropoutBits
from .forward_geometry import ForwardGeometry
from .forward_registers import ForwardRegisters
from .forward_shared import ForwardShared
from .forward_slab import ForwardSlab
from .grids import ForwardGrid, SplitGrid
from .loops import KeyLoop
from .passes import TilePass
from .references import References
from .supported import check_supported

# Names in the templates for a CTA's split of the keys, and for the tiles of a split.
SPLIT, SPLIT_TILES = symbols("split split_tiles", integer=True, nonnegative=True)
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
    role = "forward"

    @classmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TileForward]:
        return forward_candidates(spec, target)

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per owned score."""
        geometry = self.geometry
        dims, target = self.spec.head_dim + self.spec.value_head_dim, get_target(self.target)
        rate = target.tensor_flop_per_cycle if self.hopper else target.mma_flop_per_cycle
        products, convolution = 2 * dims / rate, 32 * self.toeplitz.mma_of_scores / target.mma_flop_per_cycle
        loads = 0 if self.hopper else 2 * dims / (16 * self.row_tiles) / SHARED_BYTES_PER_CYCLE  # a fragment per tile
        waits = _STEP_LATENCY / (self.blocks * geometry.rows * self.keys)
        return (products + convolution + loads + _SOFTMAX + waits) * geometry.rows / geometry.owned

    @property
    def name(self) -> str:
        """The name of the source file and of its kernel."""
        return kernel_name("tile", "fwd", self.spec, self.target)

    @cached_property
    def split(self) -> SplitForward | None:
        """The kernel for calls whose keys are split, if there is one.

        There is none for packed documents, because their blocks come from a schedule. There is none
        with dropout, because a split would have to begin at a multiple of 16 keys (DROPOUT_GROUP).
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

    # ---- The parts of the plan

    @cached_property
    def geometry(self) -> ForwardGeometry:
        """The extents of a CTA's tiles."""
        return ForwardGeometry(self.spec, self.hopper, self.warps, self.keys, self.row_tiles)

    @property
    def toeplitz(self) -> Toeplitz:
        """The convolution."""
        return self.geometry.toeplitz

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    @property
    def loop(self) -> KeyLoop:
        """The keys that a CTA needs."""
        return KeyLoop(self.spec)

    @property
    def shares_keys(self) -> bool:  # type: ignore[override]
        """Whether what keys add to scores is computed once for all warps."""
        return self.hopper and score_function(self.spec).shares_keys

    @property
    def shares_distances(self) -> bool:  # type: ignore[override]
        """Whether warps compute what distances add to scores once, and share it."""
        return self.hopper and score_function(self.spec).shares_distances

    @property
    def grows(self) -> bool:  # type: ignore[override]
        """Whether what places add to exponents grows by the same from key to key."""
        return self.hopper and not self.shares_places and score_function(self.spec).growth != 0

    @property
    def starts_sums(self) -> bool:  # type: ignore[override]
        """Whether sums of the convolution start at what a row adds to its exponents.

        The softmax must take sums as they are, apart from what places add.
        """
        return self.adds_places_apart and score_function(self.spec).rest == SCORE

    @property
    def keeps_warp_uniform(self) -> bool:
        """Whether the warp's position and the addresses of its barriers take uniform registers.

        The terms that places add leave too few other registers. Kernels without such terms were up to 2.5 % slower so.
        """
        return self.adds_places_apart

    @property
    def counts_exponents(self) -> bool:  # type: ignore[override]
        """Whether a restart begins with exponents of 2, instead of scores.

        Rows that keep their references in a restart, which other rows cause, must get the same
        probabilities, to the last bit. Scores have one rounding more than what the first convolution
        made if the compiler fused the function's last product with the shift of the exponent.
        """
        return not ScoreStage.of(self.spec).is_identity

    @property
    def references(self) -> References:
        """How far a row's reference, which is subtracted from its exponents, may be from its maximum."""
        return References.of(self.spec)

    @cached_property
    def grid(self) -> ForwardGrid:
        """The grid."""
        return ForwardGrid(self.spec, self.hopper, self.geometry.owned)

    @cached_property
    def registers(self) -> ForwardRegisters:
        """The registers of a CTA's threads."""
        return ForwardRegisters(self.geometry, get_target(self.target), self.query_fragments, self.blocks)

    @property
    def slab(self) -> ForwardSlab:
        """The score tiles."""
        return ForwardSlab(self.geometry)

    @cached_property
    def dropout_bits(self) -> DropoutBits | None:
        """The dropout masks of the tiles in flight, which on Hopper producer warps draw as they
        load.
        """
        if not self.spec.dropout:
            return None
        return DropoutBits(self.geometry.rows, self.keys, self.keys, 1, True, self.stages)

    @cached_property
    def shared(self) -> ForwardShared:
        """The map of the CTA's shared memory."""
        return ForwardShared.made_of(self.geometry, self.slab, self.dropout_bits, self.stages)

    # ---- The kernel

    @property
    def warpgroups_leave(self) -> bool:
        """Whether a warpgroup leaves the key loop after the last keys that its own rows see.

        The next warpgroup then reads zeros for the rows of the one that left. That is right if a
        convolution counts hidden scores as zeros, but not if the row of the output decides which
        terms are hidden. The others go on for no more tiles than are loaded ahead, so that none
        waits for the warpgroup that left. If the mask has tables, it could be any number of tiles.
        Two warpgroups gain less than three, so only three leave. With dropout, and with a single
        tap, the last steps would spill registers.
        """
        zeros = self.mask.hides_later and not self.mask.zeroes_terms
        ahead = not self.mask.is_tabulated and 16 * (self.warps - 4) <= self.stages * self.keys
        fits = self.slab.count > 0 and not self.dropout_bits
        return self.hopper and zeros and ahead and fits and self.warps == 12

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
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel of the pass."""
        layout = self.layout
        arguments = (
            *reads("Element", "q", "k", "v"),
            *reads("float", "weight", optional=self.toeplitz.pointwise),  # plain attention has no weight
            *(() if self.splits else sink(self.spec)),
            *parameters(self.spec),
            *self.tables,
            *layout.documents,
            *self.results,
            *layout.strides("q", "k", "v"),
            *layout.lengths,
            *numbers("int", *(("total_q",) if layout.packed else ()), *layout.tokens(self.spec), "heads", "group"),
            *numbers("float", "scale"),
            *((*DRAW, *KEEP_SCALE) if self.spec.dropout else ()),
        )
        threads, registers = self.geometry.threads, max(self.registers.split)
        return (Kernel(self.role, self.name, arguments, self.grid.size, threads, self.shared.size, registers),)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the host allocates."""
        out = Buffer("out", "q", self.layout.outputs(self.spec.value_head_dim))
        return (out, Buffer("lse", "fp32", self.layout.statistics))

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment that explain its numbers."""
        geometry = self.geometry
        rows = f"{geometry.rows} rows of scores, yields {geometry.owned}"
        yield f"A CTA computes {rows}, and streams tiles of {self.keys} keys."
        if not self.toeplitz.pointwise:
            carried = f"a score tile starts with {self.toeplitz.carry} columns of the tile before"
            yield f"Output columns lag the keys by {geometry.lag}; {carried}."
            yield f"Convolution: {self.toeplitz.mma_of_scores} mma.m16n8k16 for 16 x 8 scores."
        yield from self.layout.legend(geometry.owned, "queries")
        if self.grid.sections:
            yield from self.grid.sections.legend

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Yield facts for the plan's table."""
        yield from self.kernel_rows()
        if self.split:
            rule = self.split.rule
            yield "forward", "splits of the keys", f"for up to {rule.slots} CTAs, of {rule.min_keys} keys or more"

    def kernel_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the facts about the kernel without splits."""
        geometry = self.geometry
        yield (
            "forward",
            "CTA",
            f"{geometry.rows} rows ({geometry.owned} owned), {self.keys} keys a tile, {geometry.threads} threads",
        )
        yield (
            "forward",
            "convolution",
            "one factor"
            if self.toeplitz.pointwise
            else f"{self.toeplitz.mma_of_scores} mma of 16 x 8 x 16, lag {geometry.lag}, carry {self.toeplitz.carry}",
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
    def loop(self) -> KeyLoop:
        """The keys that a CTA needs."""
        return KeyLoop(self.spec, SPLIT * (SPLIT_TILES * self.keys - self.toeplitz.carry))

    @cached_property
    def grid(self) -> SplitGrid:
        """The grid."""
        return SplitGrid(self.spec, self.hopper, self.geometry.owned)

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
        return Min(N_K, self.geometry.rows + self.spec.pad_left + self.mask.left + self.mask.right)

    @property
    def split_tiles(self) -> Expr:
        """Number of tiles of keys that a split streams, in the templates' names."""
        return ceiling((self.visible_keys + self.toeplitz.carry * SPLITS) / (self.keys * SPLITS))

    @property
    def ctas_and_slots(self) -> tuple[Expr, Expr]:
        """The number of CTAs of a call that is not split, and the number of CTAs that fit the GPU
        at once.

        If later rows see more keys, some splits have no keys. Let h be the fraction of keys that is
        hidden from the mean row. The n splits of a block of rows are then n (1 - h) + h CTAs with
        keys. So n splits fit if ctas (n (1 - h) + h) <= slots, which is n ctas (1 - h) <= slots -
        ctas h. This method returns ctas (1 - h) and slots - ctas h, both multiplied by 2 n_k, which
        makes them integers.
        """
        n_q, n_k = symbols("n_q n_k", integer=True, positive=True)  # positive: a launch has queries and keys
        ctas, slots = BATCH * HEADS * ceiling(n_q / self.geometry.owned), self.rule.slots
        if not self.mask.favours_later_rows:
            return ctas, Integer(slots)
        hidden = Min(n_q, n_k)  # 2 n_k h
        return ctas * (2 * n_k - hidden), 2 * n_k * slots - ctas * hidden

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
        shared, registers = target.shared_of(candidate.blocks), candidate.registers
        if candidate.shared.size <= shared and registers.needed <= registers.split[0] + registers.spared:
            fitting.append(candidate)
    if fitting:
        return fitting
    rule = (
        f"the smallest forward tile needs {candidate.shared.size} bytes of shared memory and about "
        f"{registers.needed} registers a thread; {target.name} has {shared} and {registers.split[0]}"
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
