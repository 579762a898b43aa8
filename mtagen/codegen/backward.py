"""What templates of Triton's backward pass ask: how g lies in memory, and kernels that exist for rows and for keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sympy import Expr

from ..planner.kernel import Kernel
from ..planner.lift.module import LiftModule
from ..planner.lift.operands import Contraction
from ..planner.lift.tiling import Tile
from ..spec import Spec
from .pieces import Axis, LoopSource, axes, loop_source, operands, shifted, weight_entry


@dataclass(frozen=True)
class GradientLayout:
    """How g lies in the workspace, as texts: the axis read at shifted positions first, for the last must stay aligned.

    Attributes:
        rows_first: g is (slots, rows of a strip, keys), else (slots, keys, rows of a strip).
        kept_rows: rows of the strip before that are kept before a strip's, if rows come first.
        packed: whether rows are those of packed documents, of which each has places in whole tiles of its own.
    """

    rows_first: bool
    kept_rows: int
    packed: bool

    @property
    def _kept(self) -> str:
        return f"{self.kept_rows} + " if self.kept_rows else ""

    @property
    def shape(self) -> str:
        """Of the workspace."""
        keys = "max_k" if self.packed else "n_k"
        return f"slots, {self._kept}strip, pitch" if self.rows_first else f"slots, {keys}, strip"

    @property
    def strip(self) -> str:
        """Its part that one strip uses."""
        used = f": {self._kept}end - begin, :n_k" if self.rows_first else ":, : end - begin"
        return f"g[:heads, {used}]"

    @property
    def strides(self) -> Mapping[str, str]:
        """Of slots, rows and keys, by the names of arguments."""
        row, key = (1, 2) if self.rows_first else (2, 1)
        axes, strip = {"slot": 0, "row": row, "key": key}, "g" if self.packed else "g_strip"
        return {f"g_{name}": f"{strip}.stride({axis})" for name, axis in axes.items()}

    @property
    def block(self) -> tuple[str, str]:
        """Shape of a tile as it lies there, in a kernel."""
        return ("BLOCK_M", "BLOCK_N") if self.rows_first else ("BLOCK_N", "BLOCK_M")

    @property
    def transposed(self) -> str:
        """From a tile as it lies there to one of (rows, keys), or back."""
        return "" if self.rows_first else ".trans()"

    def row(self, row: str) -> str:
        """Where a row of the problem lies in a strip."""
        return f"{row} - strip_begin" + (f" + {self.kept_rows}" if self.kept_rows else "")

    def position(self, row: str, key: str) -> tuple[str, str, str]:
        """Where (row, key) of the problem lies in the workspace; of a document, in its own matrix there."""
        row = row if self.packed else self.row(row)
        return ("slot", row, key) if self.rows_first else ("slot", key, row)

    @property
    def document(self) -> str:
        """What is added to where a slot begins, so that it is where the document's matrix does."""
        begin = f"({self.kept_rows} - strip_begin)" if self.kept_rows else "-strip_begin"
        return f" + {begin} * g_row" if self.rows_first else " - strip_begin"


@dataclass(frozen=True)
class Product:
    """A contraction as the texts of its kernel and of its launch.

    Attributes:
        kernel, tile: what is launched, and its tile.
        owner: ``rows`` or ``keys``.
        own, streamed: the axis of which a program owns a block, and the other.
        own_length: how many vectors of its own axis a launch computes.
        loop: over the streamed axis.
        grad: the tensor it writes, as the host calls it.
        shape: of that tensor.
        formula: what it computes.
        g_row_shift, g_key_shift: where g is read, from the tile's first row and key.
        sums_terms: whether the terms are summed into one gradient.
        keeps_rows: whether it needs rows of g from the strip before.
        operands: what the host calls the streamed operand, by argument.
    """

    kernel: Kernel
    tile: Tile
    owner: str
    own: Axis
    streamed: Axis
    own_length: str
    loop: LoopSource
    grad: str
    shape: str
    formula: str
    g_row_shift: Expr
    g_key_shift: Expr
    sums_terms: bool
    keeps_rows: bool
    operands: Mapping[str, str]

    def steps(self, position: str) -> str:
        """Steps of the loop, each a term of a tile, before a position of the streamed axis."""
        return position if position == "0" else f"tl.cdiv({position}, {self.streamed.block}) * LOOP_TERMS"


def product(module: LiftModule, contraction: Contraction) -> Product:
    """The texts of a contraction."""
    lift, tile = module.lift, module.tile(contraction.role)
    rows, role = contraction.owner == "rows", contraction.role
    queries, keys = axes(module.spec)
    own, streamed = (queries, keys) if rows else (keys, queries)
    g = f"g[{shifted('i', contraction.g_row_shift)}, {shifted('j', contraction.g_key_shift)}]"
    if rows:
        operand = "K_t[j]" if lift.lifts_keys else f"k[{shifted('j', lift.key_shift)}]"
    else:
        operand = f"q[{shifted('i', lift.row_shift)}]" if lift.lifts_keys else "Q_t[i]"
    term = "" if contraction.sums_terms else "t, "
    owned, summed = ("i", "j") if rows else ("j", "i")
    sums = f"sum_(t, {summed})" if contraction.sums_terms else f"sum_{summed}"
    which = "for" if rows else "over the"
    kernel = module.kernel(f"bwd_{role}")
    grid_terms = dict(kernel.constants)["GRID_TERMS"]
    row_tensor, key_tensor = operands(lift)
    return Product(
        kernel=kernel,
        tile=tile,
        owner=contraction.owner,
        own=own,
        streamed=streamed,
        own_length="row_end - row_begin" if rows else own.length,
        loop=loop_source(contraction.loop, *(("", "") if rows else ("row_begin", "row_end"))),
        grad=role,
        shape=f"slots, {f'{grid_terms}, ' if grid_terms > 1 else ''}{own.total or own.length}, {module.spec.head_dim}",
        formula=f"grad[{term}{owned}] {'=' if rows else '+='} {sums} {g} * {operand}, {which} rows of a strip.",
        g_row_shift=contraction.g_row_shift,
        g_key_shift=contraction.g_key_shift,
        sums_terms=contraction.sums_terms,
        keeps_rows=rows and contraction.sums_terms and lift.kept_rows > 0,
        operands={streamed.operand: key_tensor if rows else row_tensor},
    )


@dataclass(frozen=True)
class Finish:
    """The texts of the kernel that turns gradients of the workspace into dq or dk.

    Attributes:
        kernel: what is launched.
        owner: ``rows`` for dq, ``keys`` for dk.
        own, other: the axis whose gradient it is, and the other.
        lifted: whether the gradients are those of the lifted operand.
        grad: what the host calls them.
        out: what it writes.
        shape: of that.
        formula: what it computes.
        tensors: what the host calls the tensors with strides that are passed, by argument.
    """

    kernel: Kernel
    owner: str
    own: Axis
    other: Axis
    lifted: bool
    grad: str
    out: str
    shape: str
    formula: str
    tensors: Mapping[str, str]


def finish(module: LiftModule, owner: str) -> Finish:
    """The texts for dq, if rows own it, or dk."""
    lift, rows = module.lift, owner == "rows"
    queries, keys = axes(module.spec)
    own, other = (queries, keys) if rows else (keys, queries)
    lifted = rows != lift.lifts_keys
    out = f"d{own.operand}"
    tensors = {"x": own.operand} if lifted else {}
    tensors |= {"other": other.operand} if lift.bands else {}
    unlifted = f"scale * sum_(t, s) {weight_entry(lift)} * grad[t, {shifted('x - s', lift.pad)}]"
    formula = f"{out}[x] = {unlifted if lifted else 'ln(2) * grad[x]'}"
    return Finish(
        kernel=module.kernel(f"bwd_{out}"),
        owner=owner,
        own=own,
        other=other,
        lifted=lifted,
        grad=next(one.role for one in lift.contractions if one.owner == owner),
        out=out,
        shape=_finished(own, "H" if rows else "Hkv", module.spec),
        formula=f"{formula}{', plus what scores on the band add' if lift.bands else ''}.",
        tensors=tensors,
    )


def _finished(own: Axis, heads: str, spec: Spec) -> str:
    """The shape of the gradient of an operand."""
    axes = (own.total, heads) if spec.packed else ("B", heads, own.length)
    return ", ".join([*axes, str(spec.head_dim)])
