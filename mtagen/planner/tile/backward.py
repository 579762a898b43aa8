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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ...errors import PlanError, explain
from ...spec import Spec
from ..cuda.memory import PANEL
from ..cuda.score import parameters, score_function, tile_sums, why_not_summed
from ..cuda.toeplitz import SCORE_EXPONENT, Toeplitz
from ..cuda.weight import WeightGradient
from ..cuda.wgmma import Wgmma
from ..geometry.affine import Size
from ..geometry.mask import Mask
from ..geometry.score import ParameterSum, ScoreStage
from ..kernel import Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..sizes import HEADS
from ..targets import SHARED_BYTES_PER_CYCLE, Target, get_target
from .backward_geometry import BackwardGeometry
from .backward_registers import BackwardRegisters
from .backward_shared import BackwardShared
from .dropout_bits import DRAW, KEEP_SCALE, DropoutBits
from .grids import DK_PIECES, DW_TERMS, KEY_BLOCKS, ROW_PITCH, BackwardGrid
from .loops import RowLoop
from .passes import TilePass
from .supported import check_supported

# The cost model, fitted to benchmarks/results/h200_tune_*.json.
_STEP_LATENCY = 4000  # cycles of a step that are not hidden
_SPILL_BYTES = 8 * 4  # a thread's traffic per step for each spilled register


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
        products = (6 * self.spec.head_dim + 4 * self.spec.value_head_dim) / rate
        convolutions = 32 * mma / target.mma_flop_per_cycle
        needed = self.registers.needed + (self.toeplitz.registers if self.hopper else 0)  # B operands stay in registers
        spilled = max(0, needed - self.registers.split[0])
        spills = _SPILL_BYTES * spilled * 32 * self.warps / SHARED_BYTES_PER_CYCLE
        waits = (_STEP_LATENCY + spills) / (self.rows * self.keys)
        return (products + convolutions + waits) * self.keys / self.geometry.owned

    # ---- The parts of the plan

    @cached_property
    def geometry(self) -> BackwardGeometry:
        """The extents of a CTA's tiles."""
        return BackwardGeometry(self.spec, self.hopper, self.warps, self.rows, self.keys)

    @property
    def toeplitz(self) -> Toeplitz:
        """The convolution and its adjoint."""
        return self.geometry.toeplitz

    @property
    def weight_gradient(self) -> WeightGradient:
        """The division of the gradient of W among warps."""
        return self.geometry.weight_gradient

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    @property
    def loop(self) -> RowLoop:
        """The rows that a CTA needs."""
        return RowLoop(self.mask, self.keys)

    @cached_property
    def grid(self) -> BackwardGrid:
        """The grids of the kernels."""
        return BackwardGrid(self.spec, self.hopper, self.geometry)

    @cached_property
    def registers(self) -> BackwardRegisters:
        """The registers of a CTA's threads."""
        return BackwardRegisters(self.geometry, get_target(self.target))

    @cached_property
    def dropout_bits(self) -> DropoutBits | None:
        """The dropout mask of a step's P, or of two steps if producer warps draw it.

        Keys begin anywhere in a group.
        """
        if not self.spec.dropout:
            return None
        return DropoutBits(self.rows, self.keys, self.geometry.owned, self.geometry.parts, False, 1 + self.hopper)

    @cached_property
    def shared(self) -> BackwardShared:
        """The map of the CTA's shared memory."""
        return BackwardShared.fitting(self.geometry, self.dropout_bits, get_target(self.target).shared_per_block)

    @property
    def wgmmas(self) -> tuple[Wgmma, ...]:
        """The warpgroup products."""
        spec, geometry, dtype = self.spec, self.geometry, self.spec.dtype
        return (
            Wgmma("wgmma_scores", PANEL, dtype),  # Q K^T and dO V^T
            Wgmma("wgmma_values", spec.value_head_dim, dtype, a_transposed=True, b_transposed=True),  # P^T dO
            Wgmma("wgmma_keys", spec.head_dim, dtype, a_transposed=True, b_transposed=True),  # dS^T Q
            Wgmma("wgmma_queries", geometry.dq_columns, dtype, b_transposed=True),  # dS K
        )

    # ---- Kernels

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the host allocates: results, then intermediate values of the kernels."""
        taps, heads = self.spec.cq * self.spec.ck, self.layout.batch * HEADS
        of_rows = partial(Buffer, dtype="fp32", shape=(heads, ROW_PITCH), scratch=not self.spec.sink)
        packed = self.spec.packed  # some CTAs have no tile
        return (
            *(Buffer(f"d{name}", "q", like=name) for name in "qkv"),
            Buffer("dweight", "fp32", like="weight", needs="weight is not None" if self._may_lack_weight else ""),
            of_rows("row_lse"),
            of_rows("row_dot"),
            Buffer("dq_sum", "fp32", like="q", scratch=True),
            Buffer("dw_sums", "fp32", (HEADS * taps, DW_TERMS), zeroed=packed, scratch=not packed),
            *((Buffer("dk_parts", "fp32", (DK_PIECES, 16), scratch=True),) if self.geometry.halo else ()),
            *map(self._buffer_of, self._sums),
            Buffer("progress", "int32", (heads * KEY_BLOCKS,), zeroed=True, needs="deterministic"),
        )

    @property
    def _may_lack_weight(self) -> bool:
        """Whether calls of plain attention, which have no weight, use the same kernels."""
        return self.toeplitz.pointwise

    @property
    def _sums(self) -> tuple[ParameterSum, ...]:
        """The gradients of parameters that the main kernel sums."""
        return tile_sums(ScoreStage.of(self.spec))

    def _buffer_of(self, of: ParameterSum) -> Buffer:
        """Return the memory of a sum: of each warp, of each key and row tile, or of each pair."""
        shape: dict[str, tuple[Size, ...]] = {
            "head": (KEY_BLOCKS * self.warps,),
            "key": (self.geometry.row_tiles, self.layout.keys),
            "pair": (self.layout.keys, self.layout.keys),
            "table": (KEY_BLOCKS * self.warps, of.view.table),
        }
        zeroed = self.spec.packed or of.kind in ("pair", "table")  # some CTAs have no tile, some pairs no CTA
        return Buffer(of.name, "fp32", (self.layout.batch * HEADS, *shape[of.kind]), zeroed=zeroed)

    @property
    def shares_keys(self) -> bool:  # type: ignore[override]
        """Whether what keys add to scores is computed once for all warps."""
        return self.hopper and score_function(self.spec).shares_keys

    @property
    def shares_distances(self) -> bool:  # type: ignore[override]
        """Whether warps compute what distances add to scores once, and share it."""
        return self.hopper and score_function(self.spec).shares_distances

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
        dk_parts = ("dk_parts",) if self.geometry.halo else ()

        rows = (
            *reads("Element", "out", "grad_out"),
            *reads("float", "lse"),
            *reads("float", "grad_lse", optional=True),
            *(reads("int", "cu_seq_q") if layout.packed else ()),
            *writes("float", "row_lse", "row_dot", "dq_sum"),
            *layout.strides("grad_out"),
            *numbers("int", "heads", layout.queries.name, "row_pitch"),
            *(numbers("int", "documents") if layout.packed else ()),
            *(KEEP_SCALE if spec.dropout else ()),
        )
        main = (
            *reads("Element", "q", "k", "v", "grad_out"),
            *reads("float", "weight", optional=self._may_lack_weight),
            *parameters(spec),
            *self.tables,
            *reads("float", "row_lse", "row_dot"),
            *layout.documents,
            *writes("float", "dq_sum"),
            *writes("Element", "dk", "dv"),
            *writes("float", "dw_sums", *dk_parts, *(x.name for x in self._sums)),
            *writes("int", "progress", restrict=False, optional=True),
            *layout.strides("q", "k", "v", "grad_out"),
            *layout.lengths,
            *numbers("int", *layout.tokens(spec), "heads", "group", "row_pitch"),
            *numbers("float", "scale"),
            *(DRAW if spec.dropout else ()),
        )
        finish = (
            *reads("float", "dq_sum"),
            *writes("Element", "dq"),
            *reads("float", "dw_sums"),
            *writes("float", "dweight", optional=self._may_lack_weight),
            *numbers("long long", "dq_pieces"),
            *numbers("int", "dw_terms", "heads"),
            *numbers("float", "scale"),
        )
        if self.geometry.halo:
            finish += (
                *reads("float", "dk_parts"),
                *(reads("int", "tiles", "cu_seq_k") if layout.packed else ()),
                *writes("Element", "dk"),
                *numbers("long long", "dk_pieces"),
                *numbers("int", "key_blocks", "kv_heads" if layout.packed else "n_k"),
            )
        grid = self.grid
        rows_name, finish_name = (kernel_name("tile", f"bwd_{part}", spec, self.target) for part in ("rows", "finish"))
        registers = max(self.registers.split)
        return (
            Kernel("backward_rows", rows_name, rows, grid.rows_size, 256, 0, 64),
            Kernel("backward", self.name, main, grid.size, self.geometry.threads, self.shared.size, registers),
            Kernel("backward_finish", finish_name, finish, grid.finish_size, 256, 0, 64),
        )

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment: what the kernels do in turn, and the buffers between them."""
        taps = self.spec.cq * self.spec.ck
        batch, key_blocks = "batch * ", f"ceil(n_k / {self.geometry.owned})"
        if self.spec.packed:
            batch, key_blocks = "", f"floor(total_k / {self.geometry.owned}) + documents"
        yield from self.layout.legend(self.geometry.owned, "keys")
        if self.grid.sections:
            yield from self.grid.sections.legend
        yield "Its three kernels run one after the other on one stream. They hand on, in fp32:"
        yield f"  row_lse, row_dot  of every row, ({batch}heads, row_pitch);"
        yield "  dq_sum            sums of dq, as large as q, contiguous, in dq_pieces of 16 elements;"
        yield f"  dw_sums           terms of dweight, (heads * {taps}, dw_terms){';' if self.geometry.halo else '.'}"
        if self.geometry.halo:
            parts = f"({batch}kv_heads, key_blocks, {2 * self.geometry.halo}, {self.spec.head_dim})"
            yield f"  dk_parts          dk of the {self.geometry.halo} first and last columns of each CTA, {parts},"
            yield "                    in dk_pieces of 16 elements."
        yield f"progress is null, or int32 zeros ({batch}heads, key_blocks), which make dq reproducible."
        for x in self._sums:
            parts = str(self._buffer_of(x).shape).replace("*", " * ")
            yield f"{x.name} {parts} has parts of the gradient of parameter {x.view.parameter.name}."
        yield f"row_pitch = {self.grid.symbols['row_pitch']}, key_blocks = {key_blocks},"
        yield f"dw_terms = {batch}key_blocks."
        yield f"The main kernel takes, for 16 x 8 scores, {self._convolutions}."

    @property
    def _convolutions(self) -> str:
        return f"convolution {self.toeplitz.mma_of_scores} and adjoint {self.toeplitz.mma_per_tile} mma.m16n8k16"

    def kernel_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the facts about the main kernel."""
        step = f"{self.keys} columns ({self.geometry.owned} owned), {self.rows} rows a step"
        yield "backward", "CTA", f"{step}, {self.geometry.threads} threads"
        yield "backward", "convolutions", self._convolutions
        yield "backward", "shared memory", f"{self.shared.size} bytes"


def backward_candidates(spec: Spec, target: Target) -> list[TileBackward]:
    """Return the plans of the fused backward pass that fit registers and shared memory.

    Raises:
        PlanError: no plan fits; the message names the limit.
    """
    check_supported(spec, target)
    if spec.value_head_dim != spec.head_dim and "wgmma" not in target.matrix:
        rule = f"the fused backward kernel of {target.name} needs value_head_dim equal to head_dim"
        raise PlanError(explain("value_head_dim", spec.value_head_dim, rule, f"{spec.head_dim}, or backend='triton'"))
    if reason := why_not_summed(spec):
        rule = f"the fused backward kernel does not sum all gradients: {reason}"
        raise PlanError(explain("parameters", spec.parameters, rule, "backend='triton'"))
    fitting = []
    for plan in _candidates(spec, target):
        if plan.shared.size <= target.shared_per_block and plan.registers.needed <= plan.registers.split[0]:
            fitting.append(plan)
    if fitting:
        return fitting
    need = f"{plan.registers.needed} registers a thread and {plan.shared.size} bytes of shared memory"
    rule = (
        f"dK and dV of {plan.keys} keys stay in registers: the backward pass needs about {need}; "
        f"{target.name} has {plan.registers.split[0]} and {target.shared_per_block}"
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
        if plan.geometry.dim_warps:
            yield plan
