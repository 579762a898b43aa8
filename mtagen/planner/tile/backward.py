"""The fused backward pass: a CTA owns keys and streams rows past them in steps, all query heads of its keys in turn.

    S = K-tile scores       C = conv(S)      P = exp(C - lse)     dP = dO V^T       G = P (dP - D)
    dS = adjoint conv(G)    dV += P^T dO     dK += dS^T Q         dQ += dS K        dW += diagonals of S^T G

Columns. A CTA whose first column is key c0 keeps S at column j - c0 of a slab in shared memory. Output column x of a
convolution reads columns x .. x+halo of a slab, so C, P and G have key j at column j - c0 - pad_left: the CTA owns the
keys of those columns whose windows lie in the slab. G goes to its slab ``halo`` columns further right, with zeros on
both sides, so that its adjoint convolution has key j at column j - c0 again. dS of a key near the first or the last
column takes in gradients that the CTA before or behind owns. As dQ and dK are linear in dS, each CTA multiplies what
its own G adds to dS; dQ is summed in global memory anyway, and dK of the ``halo`` first and last columns is handed on
in fp32, where the last kernel adds the neighbours' parts.

Rows. The slabs are rings of row tiles, 16 rows each, a warp's share of a step. Row i of C needs rows i-(cq-1) .. i of
S, row i of dS rows i .. i+(cq-1) of G: dS lags a row tile behind a step, and its product with Q takes the last row tile
of the step before. So does the gradient of W where a helper converts scores in their slab: the next step's convolution
still reads the last row tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
from sympy import Expr, ceiling, floor

from ...errors import PlanError, explain
from ...spec import Spec
from ..geometry.affine import N_Q
from ..geometry.mask import Mask
from ..kernel import BATCH, HEADS, KV_HEADS, Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..targets import SHARED_BYTES_PER_CYCLE, Target, get_target
from .kept import DRAW, KEEP_SCALE, KeptBits
from .layout import LAYERS, Layout
from .memory import PANEL, SharedMap
from .passes import TilePass
from .sections import Sections
from .supported import check_supported
from .toeplitz import CHUNK, SCORE_EXPONENT, Toeplitz, toeplitz
from .weight import WeightGradient, weight_gradient
from .wgmma import Wgmma

ROW_TILE = 16  # rows of a warp
_RESERVED_REGISTERS = 24  # addresses and loop state
_HELPER_REGISTERS = 56
_RESERVED_HELPER_REGISTERS = 12  # of those, for addresses and loop state
_DRAWING_REGISTERS = 4  # of the helper's, too, where it draws what dropout keeps
# The cost model; fitted to benchmarks/results/h200_tune_*.json.
_STEP_LATENCY = 4000  # cycles of a step that nothing hides
_SPILL_BYTES = 8 * 4  # a thread's traffic in a step for a register that it does not have

ROW_PITCH, KEY_BLOCKS, DQ_PIECES, DW_TERMS, DK_PIECES = sympy.symbols(
    "row_pitch key_blocks dq_pieces dw_terms dk_pieces", integer=True, positive=True
)
_C0, _OFFSET, _ROW_HALO = sympy.symbols("c0 offset ROW_HALO", integer=True)  # as the templates call them


@dataclass(frozen=True)
class TileBackward(TilePass):
    """The backward kernels of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        hopper: wgmma, and a warpgroup that loads and makes the gradient of W (sm_90a); else mma.sync, all warps alike.
        warps: warps that compute, each a row tile of a part of the columns; on Hopper 64 columns, a warpgroup a part.
        rows: rows of a step.
        keys: columns of S.
    """

    spec: Spec
    target: str
    hopper: bool
    warps: int
    rows: int
    keys: int

    pass_name = "backward"

    @classmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TileBackward]:
        return backward_candidates(spec, target)

    @property
    def name(self) -> str:
        """Name of the source file and of its main kernel."""
        return kernel_name("tile", "bwd", self.spec, self.target)

    @property
    def template(self) -> str:  # type: ignore[override]
        """The kernels' template."""
        return "backward_sm90.cu.j2" if self.hopper else "backward_sm80.cu.j2"

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score that counts."""
        target = get_target(self.target)
        rate = target.tensor_flop_per_cycle if self.hopper else target.mma_flop_per_cycle
        mma = self.toeplitz.mma_of_scores + 2 * self.toeplitz.mma_per_tile  # with the adjoint and the gradient of W
        products, convolutions = 10 * self.spec.head_dim / rate, 32 * mma / target.mma_flop_per_cycle
        wanted = self.registers + (self.toeplitz.registers if self.hopper else 0)  # B operands stay where they fit
        spilled = max(0, wanted - self.register_split[0])
        spills = _SPILL_BYTES * spilled * 32 * self.warps / SHARED_BYTES_PER_CYCLE
        waits = (_STEP_LATENCY + spills) / (self.rows * self.keys)
        return (products + convolutions + waits) * self.keys / self.owned

    # ---- Which rows and columns the mask leaves, in names of the source

    @cached_property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(self.spec)

    @property
    def first_row(self) -> Expr:
        """Row 0 of step 0: those before it have no scores with the CTA's keys, nor do those that their scores feed."""
        position = self.mask.first_position(_C0)
        if position is None:
            return sympy.S.Zero
        return sympy.Max(0, position - _OFFSET - (_ROW_HALO if self.mask.zeroes_terms else 0))

    @property
    def end_row(self) -> Expr:
        """Rows from here on have no scores with the CTA's keys."""
        position = self.mask.last_position(_C0 + self.keys - 1)
        return N_Q if position is None else sympy.Min(N_Q, position - _OFFSET + 1)

    # ---- Rows

    @property
    def row_tiles(self) -> int:
        """Row tiles of a step."""
        return self.rows // ROW_TILE

    @cached_property
    def score_ring(self) -> int:
        """Row tiles of S: a step's, and the last of the step before.

        On Hopper, all from the first that the gradient of W takes in a step to the last of the next step's, which are
        stored meanwhile. Where there is no room for so many, a helper reads the first ones early.
        """
        if not self.hopper:
            return self.row_tiles + 1
        room, least = get_target(self.target).shared_per_block, 2 * self.row_tiles
        return next((n for n in range(self._wanted_ring, least, -1) if self._shared(n).size <= room), least)

    @property
    def _wanted_ring(self) -> int:
        """Row tiles of S with which nobody waits for a helper."""
        return 2 * self.row_tiles + 1 + self.converts_scores

    @property
    def waits_for_helper(self) -> bool:
        """Whether the next step's scores take the place of some that a helper may still be reading."""
        return self.hopper and self.score_ring < self._wanted_ring

    @property
    def early_row_tiles(self) -> int:
        """Of a helper warp's row tiles of a step, those that it is done with before the next step's scores are stored.

        If these take the place of n row tiles of S, the first n of the gradient of W are the last to read them.
        """
        missing = self._wanted_ring - self.score_ring
        return -(-missing * self.weight_gradient.sets // self.row_tiles)

    @property
    def gradient_ring(self) -> int:
        """Row tiles of G: a step's, and the last of the step before."""
        return self.row_tiles + 1

    # ---- Columns

    @property
    def widened(self) -> bool:
        """Whether W is taken for one of 9 columns, with zeros from its own on: at 7 and 8 rows by 6 to 9 columns.

        G then begins with a chunk of its own, so that a helper, which has four row shifts in each of two row tiles
        there, multiplies a chunk less. Other extents gain little or lose by it: benchmarks/notes/cuda-backward.md,
        "Kernels of 7 and 8 rows".
        """
        return self.hopper and self.spec.cq in (7, 8) and 6 <= self.spec.ck <= 9

    @property
    def taps(self) -> int:
        """Columns of W, made odd by one of zeros: slabs are written two columns at a time."""
        return 9 if self.widened else self.spec.ck | 1

    @property
    def halo(self) -> int:
        """Columns that a window has beyond its first."""
        return self.taps - 1

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution, and its adjoint, whose taps are w*(u, v) = W[cq-1-u, taps-1-v]."""
        return toeplitz(self.spec.cq, self.taps, pairs=False)

    @property
    def parts(self) -> int:
        """Parts of the columns, each of ``row_tiles`` warps; the warpgroups that compute on Hopper."""
        return self.warps // self.row_tiles

    @property
    def owned(self) -> int:
        """Keys whose P and G a CTA makes, from c0 + pad_left on: columns whose windows lie in the slab of S."""
        return self.keys - self.halo

    @property
    def pad_left(self) -> int:
        """C, P and G have key j at column j - c0 - pad_left."""
        return self.spec.pad_left

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warp makes; operands of wgmma must not cross a panel.

        A warpgroup that makes them reads all of dS from shared memory. So as few do as have registers for the sums: at
        a head dim of 64 each of three warpgroups has room for 32 columns, not for 64.
        """
        dim = self.spec.head_dim
        if not self.hopper:
            return 16 * -(-dim // (16 * self.parts))
        return dim // 2 if dim == PANEL and self.parts > 2 else min(dim, PANEL)

    @property
    def dq_parts(self) -> int:
        """Parts that make dQ, each some of its columns."""
        return -(-self.spec.head_dim // self.dq_columns)

    # ---- Gradients of K and V without wgmma: a warp has blocks of 16 x 16 sums

    @property
    def dim_warps(self) -> int:
        """Warps that share the columns of dK and dV: as square a share as divides evenly."""
        blocks = self.spec.head_dim // 16
        splits = [n for n in range(1, self.warps + 1) if blocks % n == self.warps % n == 0]
        splits = [n for n in splits if self.keys // 16 % (self.warps // n) == 0]
        return min(splits, key=lambda n: blocks // n + self.keys // 16 * n // self.warps, default=0)

    @property
    def key_warps(self) -> int:
        """Warps that share the keys."""
        return self.warps // self.dim_warps if self.dim_warps else 0

    # ---- Gradient of W

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """How the gradient of W is shared.

        A helper loads operands as they are multiplied. With one set of row shifts that was measured to take longer, in
        bf16: benchmarks/notes/cuda-backward.md, "Scores are converted once".
        """
        return weight_gradient(self.spec.cq, self.weight_chunks, 1 if self.hopper else self.parts, loaded=self.hopper)

    @property
    def converts_scores(self) -> bool:
        """Whether a helper makes elements of the slab of S, which is fp16, in place, when convolutions have read it.

        The next step's convolution reads the last row tile, too, so that the gradient of W is a row tile late, like dS.
        """
        return self.weight_gradient.loaded and self.spec.dtype != "fp16"

    @property
    def weight_ahead(self) -> int:
        """Chunks by which a helper loads operands ahead of the products that take them: what its registers hold."""
        room = _HELPER_REGISTERS - _RESERVED_HELPER_REGISTERS - _DRAWING_REGISTERS * self.spec.dropout
        return next((ahead for ahead in (2, 1) if self.weight_gradient.registers(ahead) <= room), 0)

    @property
    def first_weight_chunk(self) -> int:
        """Chunk of S, relative to that of G, in which the window of G's first column starts."""
        return -self.halo // CHUNK

    @property
    def weight_chunks(self) -> int:
        """Chunks of S that the windows of a chunk of G touch, the last of them its own."""
        return 1 - self.first_weight_chunk

    @property
    def owned_gradient(self) -> tuple[int, int]:
        """First owned column of G in its slab, and the end."""
        return self.halo, self.keys

    # ---- Shared memory and registers

    @property
    def panels(self) -> int:
        """Panels of 64 columns of a tile of vectors (rows of Q, dO, K or V)."""
        return -(-self.spec.head_dim // PANEL)

    @property
    def slab_row(self) -> int:
        """Bytes from a slab's row to the next of its parity: its columns and an odd chunk, for no bank conflicts."""
        return 2 * self.keys + 16

    @property
    def tap_words(self) -> int:
        """Words of the table of pairs of neighbouring taps of a row of W, zeros on both sides."""
        return CHUNK * self.toeplitz.chunks + 6

    @cached_property
    def kept(self) -> KeptBits | None:
        """What dropout keeps of a step's P, of two steps where a helper draws it; keys begin anywhere in a group."""
        if not self.spec.dropout:
            return None
        return KeptBits(self.rows, self.keys, self.owned, self.parts, False, 1 + self.hopper)

    @cached_property
    def shared(self) -> SharedMap:
        """The CTA's shared memory."""
        return self._shared(self.score_ring)

    def _shared(self, score_ring: int) -> SharedMap:
        vectors, parity = 128 * self.panels, ROW_TILE // 2 * self.slab_row
        buffers, scores = (2 if self.hopper else 1), self.rows * 128 * -(-self.keys // PANEL)
        return SharedMap.of(
            (
                ("K", self.keys * vectors, 1024),
                ("V", self.keys * vectors, 1024),
                ("Q", (2 * self.rows if self.hopper else ROW_TILE + self.rows) * vectors, 1024),
                ("Q_ABOVE", ROW_TILE * vectors if self.hopper else 0, 1024),
                ("DO", buffers * self.rows * vectors, 1024),
                ("P", scores, 1024),
                ("DS", scores if self.hopper else 0, 1024),
                ("S", 2 * score_ring * parity + 16, 16),  # windows that do not count end past the last row
                ("G", 2 * self.gradient_ring * parity + 16, 16),  # as zeros that the last row's windows reach
                ("TAPS", 2 * 4 * self.spec.cq * self.tap_words, 16),
                ("STATISTICS", 2 * 2 * 4 * self.rows if self.hopper else 0, 16),
                ("KEPT", self.kept.size if self.kept else 0, 16),
                ("BARRIERS", 40 if self.hopper else 0, 8),
            )
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps + (128 if self.hopper else 0)

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers a thread that computes, and of the helper."""
        target = get_target(self.target)
        equal = target.registers_per_multiprocessor // self.threads
        if not self.hopper:
            return min(equal, target.registers_per_thread), 0
        launch = min(equal // 8 * 8, 248)
        share = (launch * (self.parts + 1) - _HELPER_REGISTERS) // self.parts
        return min(share // 8 * 8, 240), _HELPER_REGISTERS

    @property
    def registers(self) -> int:
        """Estimate for a thread that computes: dK, dV, C, dP, some state; without a helper also the gradient of W."""
        sums = 2 * self.keys * (self.spec.head_dim + self.rows) // (32 * self.warps)
        weights = 0 if self.hopper else 4 * len(self.weight_gradient.products) + self.toeplitz.registers
        return sums + weights + _RESERVED_REGISTERS

    @property
    def wgmmas(self) -> tuple[Wgmma, ...]:
        """The warpgroup products."""
        dtype, dim = self.spec.dtype, self.spec.head_dim
        return (
            Wgmma("wgmma_scores", PANEL, dtype),  # Q K^T and dO V^T
            Wgmma("wgmma_keys", dim, dtype, a_transposed=True, b_transposed=True),  # P^T dO and dS^T Q
            Wgmma("wgmma_queries", self.dq_columns, dtype, b_transposed=True),  # dS K
        )

    # ---- Kernels

    @property
    def row_lanes(self) -> int:
        """Threads that share a row of 16-byte columns: a power of two."""
        return 1 << (self.spec.head_dim // 8 - 1).bit_length()

    @cached_property
    def layout(self) -> Layout:
        """Where sequences lie."""
        return Layout.of(self.spec)

    @property
    def row_room(self) -> int:
        """Statistics past a sequence's last row: a CTA may load the step past the one that holds the row after it."""
        return ROW_TILE + 2 * self.rows

    @property
    def sizes(self) -> Mapping[str, Expr]:
        """What grids, buffers and arguments are counted in.

        A head's statistics have ``row_pitch`` rows. Sums of dQ are finished in ``dq_pieces`` of 16, those of dK's
        shared columns in ``dk_pieces``.
        """
        layout, pieces = self.layout, self.spec.head_dim // 16
        return {
            "row_pitch": layout.with_room(layout.queries, self.row_room),
            "key_blocks": ceiling(self.blocks_of_keys / LAYERS) * LAYERS if self.layers else self.blocks_of_keys,
            "dq_pieces": layout.batch * HEADS * layout.queries * pieces,
            "dw_terms": layout.batch * KEY_BLOCKS,
            **({"dk_pieces": layout.batch * KV_HEADS * KEY_BLOCKS * 2 * self.halo * pieces} if self.halo else {}),
        }

    @property
    def sections(self) -> Sections | None:
        """How CTAs whose rows end with those of an entry of a batch share L2; measured on sm_90a alone.

        Where the sums of dQ have an order, each CTA waits for the one before of its head. With fewer heads beside each
        other more of them would wait.
        """
        if not self.hopper or self.layout.packed or self.mask.hides_earlier:
            return None
        return Sections(BATCH * KV_HEADS, 2, N_Q, self.spec.head_dim, KEY_BLOCKS, "deterministic")

    @property
    def blocks_of_keys(self) -> Expr:
        """Blocks of keys that CTAs of a head own."""
        return self.layout.blocks(self.layout.keys, self.owned)

    @property
    def layers(self) -> Expr | None:
        """Layers of blocks of keys, which lie along y and z; None where z has another use."""
        return None if self.sections else self.layout.layers(self.blocks_of_keys)

    @property
    def tile_order(self) -> str:
        """In which order CTAs take tiles of documents, see ``templates/host/documents.j2``: long ones first.

        Those of a document come in the order of its keys: a CTA may wait for the one before.
        """
        return "earlier" if self.mask.favours_later_rows else "longest"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What the host allocates: results, then what the kernels hand on."""
        taps, heads = self.spec.cq * self.spec.ck, self.layout.batch * HEADS
        return (
            *(Buffer(f"d{name}", "q", like=name) for name in "qkv"),
            Buffer("dweight", "fp32", like="weight"),
            Buffer("row_lse", "fp32", (heads, ROW_PITCH)),
            Buffer("row_dot", "fp32", (heads, ROW_PITCH)),
            Buffer("dq_sum", "fp32", like="q"),
            Buffer("dw_sums", "fp32", (HEADS * taps, DW_TERMS), zeroed=self.spec.packed),  # some CTAs have no tile
            *((Buffer("dk_parts", "fp32", (DK_PIECES, 16)),) if self.halo else ()),
            Buffer("progress", "int32", (heads * KEY_BLOCKS,), zeroed=True, option="deterministic"),
        )

    @property
    def score_exponent(self) -> int:
        """The slab of S holds q.k 2^-exponent."""
        return SCORE_EXPONENT

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """D and zeroes first, then the gradients, then dQ and dW out of their fp32 sums."""
        spec, layout = self.spec, self.layout
        dk_parts = ("dk_parts",) if self.halo else ()

        rows = (
            *reads("Element", "out", "grad_out"),
            *reads("float", "lse", "grad_lse"),
            *(reads("int", "cu_seq_q") if layout.packed else ()),
            *writes("float", "row_lse", "row_dot", "dq_sum"),
            *layout.strides("grad_out"),
            *numbers("int", "heads", layout.queries.name, "row_pitch"),
            *(numbers("int", "documents") if layout.packed else ()),
            *(KEEP_SCALE if spec.dropout else ()),
        )
        main = (
            *reads("Element", "q", "k", "v", "grad_out"),
            *reads("float", "weight", "row_lse", "row_dot"),
            *layout.documents,
            *writes("float", "dq_sum"),
            *writes("Element", "dk", "dv"),
            *writes("float", "dw_sums", *dk_parts),
            *writes("int", "progress", restrict=False),
            *layout.strides("q", "k", "v", "grad_out"),
            *layout.lengths,
            *numbers("int", "heads", "group", "row_pitch"),
            *numbers("float", "scale"),
            *(DRAW if spec.dropout else ()),
        )
        finish = (
            *reads("float", "dq_sum"),
            *writes("Element", "dq"),
            *reads("float", "dw_sums"),
            *writes("float", "dweight"),
            *numbers("long long", "dq_pieces"),
            *numbers("int", "dw_terms", "heads"),
            *numbers("float", "scale"),
        )
        if self.halo:
            finish += (
                *reads("float", "dk_parts"),
                *(reads("int", "tiles", "cu_seq_k") if layout.packed else ()),
                *writes("Element", "dk"),
                *numbers("long long", "dk_pieces"),
                *numbers("int", "key_blocks", "kv_heads" if layout.packed else "n_k"),
            )
        rows_grid = (layout.batch * HEADS * ceiling(ROW_PITCH / (256 // self.row_lanes)),)
        if self.sections:
            main_grid = self.sections.grid
        else:
            main_grid = layout.batch * KV_HEADS, floor(KEY_BLOCKS / LAYERS), LAYERS
        pieces = ceiling(DQ_PIECES / 256) + (ceiling(DK_PIECES / 256) if self.halo else 0)
        finish_grid = (ceiling(HEADS * (spec.cq * spec.ck) / 8) + pieces,)
        rows_name, finish_name = (kernel_name("tile", f"bwd_{part}", spec, self.target) for part in ("rows", "finish"))
        registers = max(self.register_split)
        return (
            Kernel("backward_rows", rows_name, rows, rows_grid, 256, 0, 64),
            Kernel("backward", self.name, main, main_grid, self.threads, self.shared.size, registers),
            Kernel("backward_finish", finish_name, finish, finish_grid, 256, 0, 64),
        )

    @property
    def legend(self) -> Iterator[str]:
        """What the kernels do one after the other, and what they hand on."""
        taps = self.spec.cq * self.spec.ck
        batch, key_blocks = "batch * ", f"ceil(n_k / {self.owned})"
        if self.spec.packed:
            batch, key_blocks = "", f"floor(total_k / {self.owned}) + documents"
        yield from self.layout.legend(self.owned, "keys")
        if self.sections:
            yield from self.sections.legend
        yield "Its three kernels run one after the other on one stream. They hand on, in fp32:"
        yield f"  row_lse, row_dot  of every row, ({batch}heads, row_pitch);"
        yield "  dq_sum            sums of dq, as large as q, contiguous, in dq_pieces of 16 elements;"
        yield f"  dw_sums           terms of dweight, (heads * {taps}, dw_terms){';' if self.halo else '.'}"
        if self.halo:
            parts = f"({batch}kv_heads, key_blocks, {2 * self.halo}, {self.spec.head_dim})"
            yield f"  dk_parts          dk of the {self.halo} first and last columns of each CTA, {parts},"
            yield "                    in dk_pieces of 16 elements."
        yield f"progress is null, or int32 zeros ({batch}heads, key_blocks), which make dq reproducible."
        yield f"row_pitch = {self.sizes['row_pitch']}, key_blocks = {key_blocks},"
        yield f"dw_terms = {batch}key_blocks."
        yield f"The main kernel takes, for 16 x 8 scores, {self._convolutions}."

    @property
    def _convolutions(self) -> str:
        return f"convolution {self.toeplitz.mma_of_scores} and adjoint {self.toeplitz.mma_per_tile} mma.m16n8k16"

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Facts for the plan's table."""
        step = f"{self.keys} columns ({self.owned} owned), {self.rows} rows a step"
        yield "backward", "CTA", f"{step}, {self.threads} threads"
        yield "backward", "convolutions", self._convolutions
        yield "backward", "shared memory", f"{self.shared.size} bytes"


def backward_candidates(spec: Spec, target: Target) -> list[TileBackward]:
    """The fused backward kernels that fit registers and shared memory.

    Raises:
        PlanError: none does; the message names the limit.
    """
    check_supported(spec, target)
    if spec.value_head_dim != spec.head_dim:
        rule = "the fused backward kernel has one head dim"
        raise PlanError(explain("value_head_dim", spec.value_head_dim, rule, spec.head_dim))
    fitting = []
    for plan in _candidates(spec, target):
        if plan.shared.size <= target.shared_per_block and plan.registers <= plan.register_split[0]:
            fitting.append(plan)
    if fitting:
        return fitting
    need = f"{plan.registers} registers a thread and {plan.shared.size} bytes of shared memory"
    rule = (
        f"dK and dV of {plan.keys} keys stay in registers: the backward pass needs about {need}; "
        f"{target.name} has {plan.register_split[0]} and {target.shared_per_block}"
    )
    raise PlanError(explain("head_dim", spec.head_dim, rule, "a smaller head_dim, or backend='triton'"))


def _candidates(spec: Spec, target: Target) -> Iterator[TileBackward]:
    """From most to least work a CTA, the last one the smallest there is."""
    if "wgmma" in target.matrix:
        for parts in (3, 2):
            yield TileBackward(spec, target.name, True, 4 * parts, 64, PANEL * parts)
        return
    for warps, rows, keys in ((8, 64, 128), (8, 32, 128), (8, 32, 64), (4, 32, 64)):
        plan = TileBackward(spec, target.name, False, warps, rows, keys)
        if plan.dim_warps:
            yield plan
