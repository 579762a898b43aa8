"""Plan of the fused backward pass: a CTA owns keys and loops over steps of rows, for all query
heads of its keys.

    S = K-tile scores       C = conv(S)      P = exp(C - lse)     dP = dO V^T       G = P (dP - D)
    dS = adjoint conv(G)    dV += P^T dO     dK += dS^T Q         dQ += dS K        dW += diagonals of S^T G

S and G are stored in shared memory, in a score tile each ("slab" in names).

Columns. A CTA whose first column is key c0 stores S of key j at column j - c0 of the score tile.
Output column x of a convolution reads columns x .. x+halo of a score tile, so C, P and G have key j
at column j - c0 - pad_left. The CTA owns the keys of the columns whose windows lie in the score
tile. G is stored ``halo`` columns further right in its own tile, with zeros on both sides, so that
its adjoint convolution has key j at column j - c0 again. dS of a key near the first or last column
also depends on gradients of the neighbouring CTA. dQ and dK are linear in dS, so each CTA
multiplies only the part of dS that comes from its own G. dQ is summed in global memory anyway. dK
of the ``halo`` first and last columns is written in fp32, and the last kernel adds the neighbours'
parts.

Rows. Both tiles are rings of row tiles of 16 rows, one per warp and step. Row i of C needs rows
i-(cq-1) .. i of S, and row i of dS needs rows i .. i+(cq-1) of G. So dS lags a row tile behind a
step, and its product with Q reads the last row tile of the step before. The gradient of W lags as
well if producer warps convert scores in place, because the next step's convolution still reads the
last row tile of S.
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
from ..kernel import Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..sizes import BATCH, HEADS, KV_HEADS
from ..targets import SHARED_BYTES_PER_CYCLE, Target, get_target
from .dropout_bits import DRAW, KEEP_SCALE, DropoutBits
from .layout import LAYERS
from .memory import PANEL, SharedMap
from .passes import TilePass
from .sections import Sections
from .supported import check_supported
from .toeplitz import CHUNK, SCORE_EXPONENT, Toeplitz, toeplitz
from .weight import WeightGradient, weight_gradient
from .wgmma import Wgmma

ROW_TILE = 16  # rows of a warp
_RESERVED_REGISTERS = 24  # addresses and loop state
_PRODUCER_REGISTERS = 56
_RESERVED_PRODUCER_REGISTERS = 12  # part of the producer's registers: addresses and loop state
_DRAWING_REGISTERS = 4  # part of the producer's registers with dropout, whose mask it draws
# The cost model, fitted to benchmarks/results/h200_tune_*.json.
_STEP_LATENCY = 4000  # cycles of a step that are not hidden
_SPILL_BYTES = 8 * 4  # a thread's traffic per step for each spilled register

ROW_PITCH, KEY_BLOCKS, DQ_PIECES, DW_TERMS, DK_PIECES = sympy.symbols(
    "row_pitch key_blocks dq_pieces dw_terms dk_pieces", integer=True, positive=True
)
_C0, _OFFSET, _ROW_HALO = sympy.symbols("c0 offset ROW_HALO", integer=True)  # names in the templates


@dataclass(frozen=True)
class TileBackward(TilePass):
    """The backward kernels of one spec on one target.

    Attributes:
        spec: the request.
        target: name of the target.
        hopper: whether the kernel uses wgmma and a producer warpgroup, which also computes the
            gradient of W (sm_90a); otherwise it uses mma.sync, and all warps do the same.
        warps: number of computing warps. Each has a row tile of a part of the columns; on Hopper a
            part is 64 columns of a warpgroup.
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
    reverses_tiles = False  # the last kernel counts on the order of tiles
    counts_heads = counts_tiles = True  # of the grid, for workspaces with a place for each CTA

    @classmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TileBackward]:
        return backward_candidates(spec, target)

    @property
    def name(self) -> str:
        """The name of the source file and of its main kernel."""
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
        needed = self.registers + (self.toeplitz.registers if self.hopper else 0)  # B operands stay in registers
        spilled = max(0, needed - self.register_split[0])
        spills = _SPILL_BYTES * spilled * 32 * self.warps / SHARED_BYTES_PER_CYCLE
        waits = (_STEP_LATENCY + spills) / (self.rows * self.keys)
        return (products + convolutions + waits) * self.keys / self.owned

    # ---- Rows and columns that the mask leaves, in names of the source

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    @property
    def first_row(self) -> Expr:
        """First query row that the CTA needs.

        Earlier rows see none of its keys, directly or through the convolution.
        """
        position = self.mask.first_position(_C0)
        if position is None:
            return sympy.S.Zero
        return sympy.Max(0, position - _OFFSET - (_ROW_HALO if self.mask.zeroes_terms else 0))

    @property
    def end_row(self) -> Expr:
        """End of the query rows that the CTA needs: later rows see none of its keys."""
        position = self.mask.last_position(_C0 + self.keys - 1)
        return N_Q if position is None else sympy.Min(N_Q, position - _OFFSET + 1)

    @property
    def may_end_early(self) -> bool:
        """Whether the last rows may see none of the CTA's keys."""
        return self.mask.left is not None

    # ---- Rows

    @property
    def row_tiles(self) -> int:
        """Number of row tiles of a step."""
        return self.rows // ROW_TILE

    @cached_property
    def score_ring(self) -> int:
        """Number of row tiles of S in shared memory: those of a step, and the last of the step
        before.

        On Hopper the ring spans from the first row tile that the gradient of W reads in a step to
        the last of the next step, which is stored meanwhile. If shared memory has no room for that,
        the producer warps must finish with the first row tiles before they are overwritten.
        """
        if not self.hopper:
            return self.row_tiles + 1
        room, least = get_target(self.target).shared_per_block, 2 * self.row_tiles
        return next((n for n in range(self._full_score_ring, least, -1) if self._shared(n).size <= room), least)

    @property
    def _full_score_ring(self) -> int:
        """Number of row tiles of S with which no computing warp waits for a producer warp."""
        return 2 * self.row_tiles + 1 + self.converts_scores

    @property
    def waits_for_producer(self) -> bool:
        """Whether the next step's scores overwrite row tiles that a producer warp may still be
        reading.
        """
        return self.hopper and self.score_ring < self._full_score_ring

    @property
    def row_tiles_before_overwrite(self) -> int:
        """How many row tiles a producer warp must finish before the next step may overwrite S.

        If the next step overwrites n row tiles of S, the first n row tiles of the gradient of W are
        the last to read them.
        """
        missing = self._full_score_ring - self.score_ring
        return -(-missing * self.weight_gradient.sets // self.row_tiles)

    @property
    def gradient_ring(self) -> int:
        """Number of row tiles of G in shared memory: those of a step, and the last of the step
        before.
        """
        return self.row_tiles + 1

    # ---- Columns

    @property
    def pads_weight(self) -> bool:
        """Whether to pad W to 9 columns with zeros. It pays for 7 or 8 rows and 6 to 9 columns.

        G then begins at the beginning of a chunk, so that each producer warp, which has four row
        shifts in each of two row tiles there, multiplies one chunk fewer. Other extents gain little
        or lose (benchmarks/notes/cuda-backward.md, "Filters of 7 and 8 rows").
        """
        return self.hopper and self.spec.cq in (7, 8) and 6 <= self.spec.ck <= 9

    @property
    def taps(self) -> int:
        """Number of columns of W, padded with zeros to an odd number: tiles are written two columns
        at a time.
        """
        return 9 if self.pads_weight else self.spec.ck | 1

    @property
    def halo(self) -> int:
        """Number of columns of a window after its first."""
        return self.taps - 1

    @cached_property
    def toeplitz(self) -> Toeplitz:
        """The convolution, and its adjoint, whose taps are w*(u, v) = W[cq-1-u, taps-1-v]."""
        return toeplitz(self.spec.cq, self.taps, pairs=False)

    @property
    def parts(self) -> int:
        """Number of parts of the columns, each of ``row_tiles`` warps: on Hopper, of computing
        warpgroups.
        """
        return self.warps // self.row_tiles

    @property
    def owned(self) -> int:
        """Number of keys whose P and G a CTA computes, from c0 + pad_left on: windows must lie in
        the tile of S.
        """
        return self.keys - self.halo

    @property
    def pad_left(self) -> int:
        """Shift of columns: C, P and G have key j at column j - c0 - pad_left."""
        return self.spec.pad_left

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warp computes; operands of wgmma must not cross a panel.

        A warpgroup that computes columns of dQ reads all of dS from shared memory, so as few
        warpgroups do so as have registers for the sums. At a head dim of 64, each of three
        warpgroups has room for 32 columns, not for 64.
        """
        dim = self.spec.head_dim
        if not self.hopper:
            return 16 * -(-dim // (16 * self.parts))
        return dim // 2 if dim == PANEL and self.parts > 2 else min(dim, PANEL)

    @property
    def dq_parts(self) -> int:
        """Number of parts of the warps that compute dQ, each some of its columns."""
        return -(-self.spec.head_dim // self.dq_columns)

    # ---- Gradients of K and V without wgmma: a warp has blocks of 16 x 16 sums

    @property
    def dim_warps(self) -> int:
        """Number of warps that divide the columns of dK and dV, so that a warp's part is about
        square.
        """
        blocks = self.spec.head_dim // 16
        splits = [n for n in range(1, self.warps + 1) if blocks % n == self.warps % n == 0]
        splits = [n for n in splits if self.keys // 16 % (self.warps // n) == 0]
        return min(splits, key=lambda n: blocks // n + self.keys // 16 * n // self.warps, default=0)

    @property
    def key_warps(self) -> int:
        """Number of warps that divide the keys of dK and dV."""
        return self.warps // self.dim_warps if self.dim_warps else 0

    # ---- Gradient of W

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """The division of the gradient of W among warps.

        Producer warps load operands as they are multiplied, unless there is one set of row shifts,
        for which that took longer in bf16 (benchmarks/notes/cuda-backward.md, "Scores are converted once").
        """
        return weight_gradient(self.spec.cq, self.weight_chunks, 1 if self.hopper else self.parts, loaded=self.hopper)

    @property
    def converts_scores(self) -> bool:
        """Whether producer warps convert S from fp16 to elements, in place, after convolutions have
        read it.

        The next step's convolution reads the last row tile, too, so the gradient of W lags by a row
        tile, like dS.
        """
        return self.weight_gradient.loaded and self.spec.dtype != "fp16"

    @property
    def weight_ahead(self) -> int:
        """Chunks by which a producer warp loads operands ahead of their products, as its registers
        allow.
        """
        room = _PRODUCER_REGISTERS - _RESERVED_PRODUCER_REGISTERS - _DRAWING_REGISTERS * self.spec.dropout
        return next((ahead for ahead in (2, 1) if self.weight_gradient.registers(ahead) <= room), 0)

    @property
    def first_weight_chunk(self) -> int:
        """The chunk of S in which the window of G's first column starts, relative to the chunk of
        G.
        """
        return -self.halo // CHUNK

    @property
    def weight_chunks(self) -> int:
        """Number of chunks of S that the windows of a chunk of G touch; the last has the same
        number as G's.
        """
        return 1 - self.first_weight_chunk

    @property
    def owned_gradient(self) -> tuple[int, int]:
        """First owned column of G in its tile, and the end of the owned columns."""
        return self.halo, self.keys

    # ---- Shared memory and registers

    @property
    def panels(self) -> int:
        """Number of panels of 64 columns of a tile of vectors (rows of Q, dO, K or V)."""
        return -(-self.spec.head_dim // PANEL)

    @property
    def slab_row(self) -> int:
        """Bytes from a row of a score tile to the next of its parity; an odd chunk avoids bank
        conflicts.
        """
        return 2 * self.keys + 16

    @property
    def tap_words(self) -> int:
        """Words of the table of pairs of neighbouring taps of a row of W, with zeros on both sides."""
        return CHUNK * self.toeplitz.chunks + 6

    @cached_property
    def dropout_bits(self) -> DropoutBits | None:
        """The dropout mask of a step's P, or of two steps if producer warps draw it.

        Keys begin anywhere in a group.
        """
        if not self.spec.dropout:
            return None
        return DropoutBits(self.rows, self.keys, self.owned, self.parts, False, 1 + self.hopper)

    @cached_property
    def shared(self) -> SharedMap:
        """The map of the CTA's shared memory."""
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
                ("S", 2 * score_ring * parity + 16, 16),  # unused windows end past the last row
                ("G", 2 * self.gradient_ring * parity + 16, 16),  # the last row's windows reach zeros after it
                ("TAPS", 2 * 4 * self.spec.cq * self.tap_words, 16),
                ("STATISTICS", 2 * 2 * 4 * self.rows if self.hopper else 0, 16),
                ("DROPOUT", self.dropout_bits.size if self.dropout_bits else 0, 16),
                ("BARRIERS", 40 if self.hopper else 0, 8),
            )
        )

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * self.warps + (128 if self.hopper else 0)

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of a thread of the producer warpgroup."""
        target = get_target(self.target)
        equal = target.registers_per_multiprocessor // self.threads
        if not self.hopper:
            return min(equal, target.registers_per_thread), 0
        launch = min(equal // 8 * 8, 248)
        available = (launch * (self.parts + 1) - _PRODUCER_REGISTERS) // self.parts
        return min(available // 8 * 8, 240), _PRODUCER_REGISTERS

    @property
    def registers(self) -> int:
        """Estimated registers of a computing thread: dK, dV, C, dP, state; before Hopper also the
        gradient of W.
        """
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
        """Number of threads that share a row of 16-byte columns, a power of two."""
        return 1 << (self.spec.head_dim // 8 - 1).bit_length()

    @property
    def row_room(self) -> int:
        """Rows of statistics past a sequence's last row, which a CTA may load: up to a step and a
        row tile more.
        """
        return ROW_TILE + 2 * self.rows

    @property
    def sizes(self) -> Mapping[str, Expr]:
        """Values of the symbols in grids, buffers and arguments.

        A head's statistics have ``row_pitch`` rows. The last kernel finishes the sums of dQ in
        ``dq_pieces`` of 16, and dK of columns that CTAs share in ``dk_pieces``.
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
        """The sections of heads whose CTAs share L2; None except for batches on sm_90a, where it
        was measured.

        Sections are not used if gradients must be deterministic. Then each CTA waits for the one
        before it of its head, and with fewer heads side by side more CTAs would wait.
        """
        if not self.hopper or self.layout.packed or self.mask.hides_earlier:
            return None
        return Sections(BATCH * KV_HEADS, 2, N_Q, self.spec.head_dim, KEY_BLOCKS, "deterministic")

    @property
    def blocks_of_keys(self) -> Expr:
        """Number of blocks of keys of a head, each owned by a CTA."""
        return self.layout.blocks(self.layout.keys, self.owned)

    @property
    def layers(self) -> Expr | None:
        """Number of layers along z of blocks of keys, which lie along y;

        None if z has another use.
        """
        return None if self.sections else self.layout.layers(self.blocks_of_keys)

    @property
    def tile_order(self) -> str:
        """The order in which CTAs take blocks of documents (``templates/host/documents.py``): long
        ones first.

        Blocks of a document come in the order of its keys, because a CTA may wait for the one
        before it.
        """
        return "earlier" if self.mask.favours_later_rows else "longest"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the host allocates: results, then intermediate values of the kernels."""
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
        """Exponent of the scale of S in shared memory, which holds q.k 2^-exponent."""
        return SCORE_EXPONENT

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels: the first computes D and zeroes sums, the second gradients, the third dQ and
        dW from sums.
        """
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
        """Lines of the source's comment: what the kernels do in turn, and the buffers between them."""
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
        """Yield facts for the plan's table."""
        step = f"{self.keys} columns ({self.owned} owned), {self.rows} rows a step"
        yield "backward", "CTA", f"{step}, {self.threads} threads"
        yield "backward", "convolutions", self._convolutions
        yield "backward", "shared memory", f"{self.shared.size} bytes"


def backward_candidates(spec: Spec, target: Target) -> list[TileBackward]:
    """Return the plans of the fused backward pass that fit registers and shared memory.

    Raises:
        PlanError: no plan fits; the message names the limit.
    """
    check_supported(spec, target)
    if spec.value_head_dim != spec.head_dim:
        rule = "the fused backward kernel needs value_head_dim equal to head_dim"
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
    """Yield candidates from most to least work per CTA."""
    if "wgmma" in target.matrix:
        for parts in (3, 2):
            yield TileBackward(spec, target.name, True, 4 * parts, 64, PANEL * parts)
        return
    for warps, rows, keys in ((8, 64, 128), (8, 32, 128), (8, 32, 64), (4, 32, 64)):
        plan = TileBackward(spec, target.name, False, warps, rows, keys)
        if plan.dim_warps:
            yield plan
