"""The fused forward pass: a CTA owns rows of queries and streams tiles of keys and values past them.

A warp holds 16 rows of scores in registers, or twice 16, writes them to a slab in shared memory, and convolves rows of
the slab, its own and the cq-1 above them, on the tensor cores. So a CTA of R rows yields R - (cq-1) rows of outputs,
and its first cq-1 rows serve as halo only. Along the keys there is no halo: the slab keeps the last ``carry`` columns
of the tile before, and outputs lag the keys by ``lag`` columns, such that every window starts on a chunk of the slab.

Scores that one tap convolves stay in their registers; then there is no slab.
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
from ..kernel import BATCH, HEADS, Argument, Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..splits import SplitRule, split_rule
from ..targets import RESERVED_SHARED, SHARED_BYTES_PER_CYCLE, Target, get_target
from .combine import SPLITS, Combine
from .kept import DRAW, KEEP_SCALE, KeptBits
from .layout import LAYERS, Layout
from .memory import SharedMap
from .passes import TilePass
from .sections import Sections
from .supported import check_supported
from .toeplitz import CHUNK, SCORE_EXPONENT, Toeplitz, toeplitz
from .wgmma import Wgmma

# What is a CTA's, in the names of the templates: its first row, how many rows from it on, and its split of the keys.
FIRST, FIRST_ROWS, OFFSET = symbols("first rows offset", integer=True)
SPLIT, SPLIT_TILES = symbols("split split_tiles", integer=True, nonnegative=True)
_SPARED_REGISTERS = 8  # of threads that compute, for those that draw: benchmarks/notes/data.md, "Dropout"
_RESERVED_REGISTERS = {True: 18, False: 50}  # addresses, loop state, softmax state; without wgmma, A and B operands too
# The cost model, in cycles of a multiprocessor.
_SOFTMAX = 0.06  # a score's share of what tensor cores do not do
_STEP_LATENCY = 1200  # of a step, that other warps do not hide
_COMBINE_WARPS = 1  # that share the splits of a row


@dataclass(frozen=True)
class TileForward(TilePass):
    """The forward kernel of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        hopper: wgmma and warp specialisation (sm_90a), else mma.sync (sm_80 and later).
        warps: warps that own 16 rows each.
        keys: keys of a tile.
        stages: tiles of K and of V in shared memory.
        query_fragments: how many of Q's head_dim / 16 fragments stay in registers: all, or none.
        row_tiles: tiles of 16 rows a warp has.
        blocks: CTAs that share a multiprocessor.
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
    role = "forward"  # of the kernel
    splits = False  # whether CTAs take splits of the keys

    @classmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TileForward]:
        return forward_candidates(spec, target)

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score that counts."""
        dims, target = self.spec.head_dim + self.spec.value_head_dim, get_target(self.target)
        rate = target.tensor_flop_per_cycle if self.hopper else target.mma_flop_per_cycle
        products, convolution = 2 * dims / rate, 32 * self.toeplitz.mma_of_scores / target.mma_flop_per_cycle
        loads = 0 if self.hopper else 2 * dims / (16 * self.row_tiles) / SHARED_BYTES_PER_CYCLE  # a fragment a tile
        waits = _STEP_LATENCY / (self.blocks * self.rows * self.keys)
        return (products + convolution + loads + _SOFTMAX + waits) * self.rows / self.owned

    @property
    def name(self) -> str:
        """Name of the source file and of its kernel."""
        return kernel_name("tile", "fwd", self.spec, self.target)

    @cached_property
    def split(self) -> SplitForward | None:
        """The kernel for calls whose keys are split.

        Packed documents have none, for their tiles come from a schedule; nor has dropout, which draws for groups of
        keys that a split would have to begin with.
        """
        if self.spec.packed or self.spec.dropout:
            return None
        return SplitForward(**{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def cuda(self) -> Mapping[str, TilePass]:
        return {one.role: one for one in (self, self.split) if one}

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
        """Which keys a query sees."""
        return Mask.of(self.spec)

    @property
    def key_end(self) -> Expr:
        """Where the keys end that some of a CTA's first ``rows`` rows see, in the templates' names."""
        last = self.mask.last_key(FIRST + FIRST_ROWS - 1 + OFFSET)
        return N_K if last is None else Min(N_K, last + 1)

    @property
    def warpgroups_leave(self) -> bool:
        """Whether a warpgroup ends with the last keys that its own rows see, while those of later rows go on.

        The next one goes on with zeros for its rows. They are what a convolution takes for hidden scores, but not
        where hidden terms are those that the row of the output does not see. Tiles that the others go on with are no
        more than are loaded ahead, so that none waits for the warpgroup that has left. Two warpgroups gain less than
        three. With dropout, and where there is one tap, the last steps would spill registers.
        """
        zeros = self.mask.hides_later and not self.mask.zeroes_terms
        ahead = 16 * (self.warps - 4) <= self.stages * self.keys
        fits = self.slabs > 0 and not self.kept
        return self.hopper and zeros and ahead and fits and self.warps == 12

    @property
    def key_begin(self) -> Expr:
        """Where the keys begin that outputs of a CTA are made of, in the templates' names: on a chunk, or a group."""
        begin = self.mask.begin(FIRST + self.halo + N_K - N_Q - self.spec.pad_left)
        multiple = DROPOUT_GROUP if self.spec.dropout else CHUNK
        return multiple * floor(begin / multiple)

    @property
    def score_exponent(self) -> int:
        """Slabs hold q.k 2^-score_exponent; registers hold q.k."""
        return 0 if self.toeplitz.pointwise else SCORE_EXPONENT

    @property
    def rows(self) -> int:
        """Rows of scores a CTA computes."""
        return 16 * self.row_tiles * self.warps

    @property
    def halo(self) -> int:
        """Rows above a row that its output reads."""
        return self.spec.cq - 1

    @cached_property
    def owned(self) -> int:
        """Rows of output a CTA makes."""
        return self.rows - self.halo

    @property
    def lag(self) -> int:
        """Columns by which outputs lag the tiles: a window then starts ``carry`` before its tile, on a chunk."""
        return self.toeplitz.carry - self.spec.pad_left + self.lead

    @property
    def lead(self) -> int:
        """Keys before the first one at which tiles begin. With dropout, those of outputs then begin with a group."""
        return (self.spec.pad_left - self.toeplitz.carry) % DROPOUT_GROUP if self.spec.dropout else 0

    @property
    def tiles(self) -> int:
        """Output tiles of 8 columns in a tile of keys."""
        return self.keys // CHUNK

    @property
    def slabs(self) -> int:
        """Buffers of the slab; two let a warp write the next tile's scores while others read this one's."""
        return 0 if self.toeplitz.pointwise else 2 if self.hopper else 1

    @property
    def pad(self) -> int:
        """Rows of zeros before a slab's first row, of which the last cq-1 are its halo; even, to keep parities."""
        return -(-self.halo // 2) * 2

    @property
    def slab_chunks(self) -> int:
        """Chunks of a slab's row that windows read whole."""
        return self.tiles + self.toeplitz.chunks - 1

    @property
    def slab_row(self) -> int:
        """Bytes from a slab's row to the next of its parity: an odd number of chunks, for no bank conflicts."""
        return 16 * (self.slab_chunks | 1)

    @property
    def slab_parity(self) -> int:
        """Bytes of a slab's rows of one parity."""
        return (self.rows + self.pad) // 2 * self.slab_row

    @property
    def gather_tile(self) -> int:
        """Bytes of a tile's gathered columns, one word a row."""
        return 4 * (self.pad + self.rows + 2) if self.toeplitz.gathers else 0

    @property
    def carry_chunks(self) -> int:
        """Chunks of the tile before at a slab's start."""
        return self.toeplitz.carry // CHUNK

    @property
    def panels(self) -> tuple[int, int]:
        """Panels of 64 columns of (Q and K, V) in shared memory."""
        return -(-self.spec.head_dim // 64), -(-self.spec.value_head_dim // 64)

    @property
    def scales_queries(self) -> bool:
        """Whether 2^-8 is applied to Q: exact in bf16's range; fp16 scores are scaled one by one."""
        return self.spec.dtype == "bf16" and not self.toeplitz.pointwise

    @property
    def masks_scores(self) -> bool:
        """Whether hidden scores become zeros; those of a single tap reach outputs that are hidden anyway."""
        return self.mask.zeroes_scores and not self.toeplitz.pointwise

    @property
    def scales_scores(self) -> bool:
        """Whether 2^-8 is applied to scores, where it is not to Q."""
        return self.score_exponent > 0 and not self.scales_queries

    @cached_property
    def kept(self) -> KeptBits | None:
        """What dropout keeps of a tile; where warps that load draw it, of as many tiles as they load ahead."""
        return KeptBits(self.rows, self.keys, self.keys, 1, True, self.stages) if self.spec.dropout else None

    @property
    def taps(self) -> int:
        """Bytes of a head's weights."""
        return 4 * self.spec.cq * self.spec.ck

    @cached_property
    def shared(self) -> SharedMap:
        """The CTA's shared memory."""
        barriers = 8 * (4 * self.stages + 4 * self.warps) if self.hopper else 0
        k_panels, v_panels = self.panels
        return SharedMap.of(
            (
                ("Q", k_panels * self.rows * 128, 1024),
                ("K", self.stages * k_panels * self.keys * 128, 1024),
                ("V", self.stages * v_panels * self.keys * 128, 1024),
                ("SLAB", self.slabs * 2 * self.slab_parity, 16),
                ("GATHER", self.slabs * self.tiles * self.gather_tile, 16),
                ("KEPT", self.kept.size if self.kept else 0, 4),
                ("TAPS", self.warps // 4 * self.taps if self.hopper else 0, 4),  # a warpgroup awaits its own copy
                ("BARRIERS", barriers, 8),
            )
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA; on Hopper a warpgroup more, which loads."""
        return 32 * self.warps + (128 if self.hopper else 0)

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers a thread of a warpgroup that computes, and of the one that loads."""
        if self.hopper:
            # To draw what is kept takes more than to load.
            drawing = {1: (240, 56), 2: (224, 56), 3: (160 - _SPARED_REGISTERS, 56)}
            return (drawing if self.spec.dropout else {1: (240, 24), 2: (240, 24), 3: (160, 32)})[self.warps // 4]
        target = get_target(self.target)
        return min(target.registers_per_thread, target.registers_per_multiprocessor // (self.threads * self.blocks)), 0

    @property
    def spared(self) -> int:
        """Registers that a thread that computes gives to those that draw what is kept; it may then spill as many."""
        return _SPARED_REGISTERS if self.kept and self.hopper else 0

    @property
    def registers(self) -> int:
        """Estimate for a thread that computes: O, the scores, on Hopper at once the convolved ones, B operands, Q."""
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

    @cached_property
    def layout(self) -> Layout:
        """Where sequences lie."""
        return Layout.of(self.spec)

    @property
    def results(self) -> tuple[Argument, ...]:
        """Pointers to what the kernel makes."""
        return (*writes("Element", "out"), *writes("float", "lse"))

    @property
    def head_tiles(self) -> Expr:
        """Work tiles of a head."""
        return self.layout.blocks(self.layout.queries, self.owned)

    @property
    def sections(self) -> Sections | None:
        """How CTAs whose keys begin with those of an entry of a batch share L2; measured on sm_90a alone."""
        if not self.hopper or self.layout.packed or self.mask.hides_earlier:
            return None
        return Sections(BATCH * HEADS, 4, N_K, self.spec.head_dim, self.head_tiles)

    @property
    def layers(self) -> Expr | None:
        """Layers of work tiles, which lie along y and z; None where z has another use."""
        return None if self.sections else self.layout.layers(self.head_tiles)

    @property
    def grid(self) -> tuple[Expr, ...]:
        """CTAs: one for each work tile of each head."""
        if self.sections:
            return self.sections.grid
        return self.layout.batch * HEADS, ceiling(self.head_tiles / LAYERS), LAYERS

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The one kernel."""
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
        """What the host allocates."""
        out = Buffer("out", "q", self.layout.outputs(self.spec.value_head_dim))
        return (out, Buffer("lse", "fp32", self.layout.statistics))

    @property
    def tile_order(self) -> str:
        """In which order CTAs take tiles of documents, see ``templates/host/documents.j2``: long ones first."""
        return "later" if self.mask.favours_later_rows else "longest"

    @property
    def legend(self) -> Iterator[str]:
        """What the numbers of the source mean."""
        yield f"A CTA computes {self.rows} rows of scores, yields {self.owned}, and streams tiles of {self.keys} keys."
        if not self.toeplitz.pointwise:
            carried = f"a slab starts with {self.toeplitz.carry} columns of the tile before"
            yield f"Output columns lag the keys by {self.lag}; {carried}."
            yield f"Convolution: {self.toeplitz.mma_of_scores} mma.m16n8k16 for 16 x 8 scores."
        yield from self.layout.legend(self.owned, "queries")
        if self.sections:
            yield from self.sections.legend

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Facts for the plan's table."""
        yield from self.kernel_rows()
        if self.split:
            rule = self.split.rule
            yield "forward", "splits of the keys", f"for up to {rule.slots} CTAs, of {rule.min_keys} keys or more"

    def kernel_rows(self) -> Iterator[tuple[str, str, str]]:
        """Those of the kernel alone, where calls are not split."""
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
    """The same kernel for CTAs that take a split of the keys, and the one that merges splits.

    A split streams so many tiles, the last one what is left. It begins ``carry`` keys before the end of the one before,
    and so makes each output whose window begins with its keys.
    """

    role = "forward_split"
    splits = True

    @property
    def name(self) -> str:
        """Name of the source file and of its kernel."""
        return kernel_name("tile", "fwd_split", self.spec, self.target)

    @property
    def key_begin(self) -> Expr:
        """Where a CTA's keys begin, in the templates' names."""
        return super().key_begin + SPLIT * (SPLIT_TILES * self.keys - self.toeplitz.carry)

    @property
    def repeated(self) -> int:
        """Columns of a later split's first tile that are outputs of the split before: their windows begin there."""
        return self.spec.pad_left

    @property
    def seen_keys(self) -> Expr:
        """Keys that the splits of a tile of rows share, in names of the host and of the templates.

        Where a window begins within a chunk it may be a few more, which the last split takes as all that are left.
        """
        if self.mask.left is None or self.mask.right is None:
            return N_K
        return Min(N_K, self.rows + self.spec.pad_left + self.mask.left + self.mask.right)

    @property
    def split_tiles(self) -> Expr:
        """Tiles of keys that a split streams, in the templates' names."""
        return ceiling((self.seen_keys + self.toeplitz.carry * SPLITS) / (self.keys * SPLITS))

    @property
    def ctas_and_slots(self) -> tuple[Expr, Expr]:
        """CTAs of a call that is not split, and those that the GPU holds at once.

        Where later rows see more keys, some splits have none: if the mean row does not see a share h of the keys, then
        n splits of a tile of rows are n (1 - h) + h CTAs with keys. So a CTA counts 1 - h, and takes h slots besides.
        Both numbers are times 2 n_k, so that they are integers.
        """
        n_q, n_k = symbols("n_q n_k", integer=True, positive=True)  # a call has some of both
        ctas, slots = BATCH * HEADS * ceiling(n_q / self.owned), self.rule.slots
        if not self.mask.favours_later_rows:
            return ctas, Integer(slots)
        hidden = Min(n_q, n_k)  # from the mean row, of 2 n_k keys
        return ctas * (2 * n_k - hidden), 2 * n_k * slots - ctas * hidden

    @property
    def sections(self) -> None:
        """None: only calls that do not fill the GPU are split."""
        return None

    @property
    def layers(self) -> None:
        """None: calls that do not fill the GPU have few work tiles."""
        return None

    @property
    def rule(self) -> SplitRule:
        """How many splits a call has: as many as the GPU holds at once, and one where it has CTAs enough without."""
        return split_rule(self.blocks, self.keys, get_target(self.target).multiprocessors, max_waves=1)

    @property
    def combine(self) -> Combine:
        """How splits are merged."""
        return Combine(self.spec, self.target, "fwd", self.layout.statistics, _COMBINE_WARPS)

    @property
    def results(self) -> tuple[Argument, ...]:
        """Pointers to what the kernel makes."""
        return writes("float", "partial", "partial_lse")

    @property
    def grid(self) -> tuple[Expr, ...]:
        """CTAs: one for each split of each work tile."""
        return BATCH * HEADS, self.head_tiles, SPLITS

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel and the one that merges splits."""
        return (*super().kernels, self.combine.kernel)

    @property
    def legend(self) -> Iterator[str]:
        """What the numbers of the source mean."""
        yield from super().legend
        yield "partial (batch * heads * n_q, splits, dv) and partial_lse (log2) are the results of splits of the keys."


def forward_candidates(spec: Spec, target: Target) -> list[TileForward]:
    """The fused forward kernels that fit registers and shared memory.

    Raises:
        PlanError: none does; the message names the limit.
    """
    check_supported(spec, target)
    fitting = []
    for candidate in _candidates(spec, target):
        blocks = candidate.blocks
        shared = min(target.shared_per_block, target.shared_per_multiprocessor // blocks - RESERVED_SHARED)
        if candidate.shared.size <= shared and candidate.registers <= candidate.register_split[0] + candidate.spared:
            fitting.append(candidate)
    if fitting:
        return fitting
    rule = (
        f"the smallest forward tile needs {candidate.shared.size} bytes of shared memory and about "
        f"{candidate.registers} registers a thread; {target.name} has {shared} and {candidate.register_split[0]}"
    )
    raise PlanError(explain("head_dim", spec.head_dim, rule, "a smaller head_dim, or backend='triton'"))


def _candidates(spec: Spec, target: Target) -> Iterator[TileForward]:
    """From most to least work a CTA, the last one the smallest there is."""
    fragments = spec.head_dim // 16
    if "wgmma" in target.matrix:
        wide = (128,) if toeplitz(spec.cq, spec.ck).pointwise else ()  # without a slab there is room for them
        for warpgroups, keys in product((3, 2, 1), (*wide, 64, 32)):
            for in_registers in (fragments, 0) if fragments <= 4 else (0,):
                yield TileForward(spec, target.name, True, 4 * warpgroups, keys, 2, in_registers)
    else:
        # Two tiles a warp halve the reads of K and V; a second CTA hides what the first one waits for.
        two_tiles = [(4, keys, 2, 2) for keys in (64, 48, 32)]
        one_tile = [(warps, keys, 1, 1) for warps in (8, 4) for keys in (64, 48, 32)]
        for warps, keys, row_tiles, blocks in (*two_tiles, *one_tile):
            in_registers = fragments if fragments * row_tiles <= 8 and spec.value_head_dim <= 128 else 0
            yield TileForward(spec, target.name, False, warps, keys, 1, in_registers, row_tiles, blocks)
