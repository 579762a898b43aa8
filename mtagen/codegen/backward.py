"""Values for the templates of Triton's backward pass: the layout of g, kernels for rows and for
keys.

g is the gradient of the scores.
"""

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
    """The layout of g in the workspace, as texts of source code.

    The axis that is read at shifted positions comes first, because the last axis must stay aligned.

    Attributes:
        rows_first: whether g is (slots, rows of a chunk, keys), else (slots, keys, rows of a
            chunk).
        carried_rows: rows of the chunk before that are kept in front of a chunk's rows, if rows
            come first.
        packed: whether rows are those of packed documents, each in whole tiles of its own.
    """

    rows_first: bool
    carried_rows: int
    packed: bool

    @property
    def _carried(self) -> str:
        return f"{self.carried_rows} + " if self.carried_rows else ""

    @property
    def shape(self) -> str:
        """Shape of the workspace."""
        keys = "max_k" if self.packed else "n_k"
        return f"slots, {self._carried}strip, pitch" if self.rows_first else f"slots, {keys}, strip"

    @property
    def strip(self) -> str:
        """The part of the workspace that one chunk of rows uses."""
        used = f": {self._carried}end - begin, :n_k" if self.rows_first else ":, : end - begin"
        return f"g[:heads, {used}]"

    @property
    def strides(self) -> Mapping[str, str]:
        """Strides of slots, rows and keys, by the names of arguments."""
        row, key = (1, 2) if self.rows_first else (2, 1)
        axes, strip = {"slot": 0, "row": row, "key": key}, "g" if self.packed else "g_strip"
        return {f"g_{name}": f"{strip}.stride({axis})" for name, axis in axes.items()}

    @property
    def block(self) -> tuple[str, str]:
        """Shape of a block of g in a kernel, in the order of memory."""
        return ("BLOCK_M", "BLOCK_N") if self.rows_first else ("BLOCK_N", "BLOCK_M")

    @property
    def transposed(self) -> str:
        """The operation that turns a block in memory order into (rows, keys), or back."""
        return "" if self.rows_first else ".trans()"

    def row(self, row: str) -> str:
        """Return where a row of the problem lies in its chunk."""
        return f"{row} - strip_begin" + (f" + {self.carried_rows}" if self.carried_rows else "")

    def position(self, row: str, key: str) -> tuple[str, str, str]:
        """Return the index of (row, key) in the workspace, or in a packed document's matrix there."""
        row = row if self.packed else self.row(row)
        return ("slot", row, key) if self.rows_first else ("slot", key, row)

    @property
    def document(self) -> str:
        """The term that leads from the beginning of a slot to that of the document's matrix."""
        begin = f"({self.carried_rows} - strip_begin)" if self.carried_rows else "-strip_begin"
        return f" + {begin} * g_row" if self.rows_first else " - strip_begin"


@dataclass(frozen=True)
class Product:
    """A product of g with queries or keys, as the texts of its kernel and of its launch.

    Attributes:
        kernel, tile: the kernel that is launched, and its tile.
        owner: ``rows`` or ``keys``.
        owned, streamed: the axis of which a program owns a block, and the other axis.
        owned_length: number of vectors of the owned axis that a launch computes.
        loop: the loop over the streamed axis.
        grad: the host's name of the tensor that the kernel writes.
        shape: shape of that tensor.
        formula: the mathematics of the kernel, for its docstring.
        g_row_shift, g_key_shift: shifts of g against the tile's first row and key.
        sums_terms: whether the terms are summed into one gradient.
        keeps_rows: whether the kernel needs rows of g from the chunk before.
        operands: the host's name of the streamed operand, by argument.
    """

    kernel: Kernel
    tile: Tile
    owner: str
    owned: Axis
    streamed: Axis
    owned_length: str
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
        """Return the number of loop steps before a position of the streamed axis; a step is a
        tile's term.
        """
        return position if position == "0" else f"tl.cdiv({position}, {self.streamed.block}) * LOOP_TERMS"


def product(module: LiftModule, contraction: Contraction) -> Product:
    """Return the texts of a contraction."""
    lift, tile = module.lift, module.tile(contraction.role)
    rows, role = contraction.owner == "rows", contraction.role
    queries, keys = axes(module.spec)
    owned, streamed = (queries, keys) if rows else (keys, queries)
    g = f"g[{shifted('i', contraction.g_row_shift)}, {shifted('j', contraction.g_key_shift)}]"
    if rows:
        operand = "K_t[j]" if lift.lifts_keys else f"k[{shifted('j', lift.key_shift)}]"
    else:
        operand = f"q[{shifted('i', lift.row_shift)}]" if lift.lifts_keys else "Q_t[i]"
    term = "" if contraction.sums_terms else "t, "
    index, summed = ("i", "j") if rows else ("j", "i")
    sums = f"sum_(t, {summed})" if contraction.sums_terms else f"sum_{summed}"
    which = "for" if rows else "over the"
    kernel = module.kernel(f"bwd_{role}")
    grid_terms = dict(kernel.constants)["GRID_TERMS"]
    row_tensor, key_tensor = operands(lift)
    return Product(
        kernel=kernel,
        tile=tile,
        owner=contraction.owner,
        owned=owned,
        streamed=streamed,
        owned_length="row_end - row_begin" if rows else owned.length,
        loop=loop_source(contraction.loop, *(("", "") if rows else ("row_begin", "row_end"))),
        grad=role,
        shape=f"slots, {f'{grid_terms}, ' if grid_terms > 1 else ''}{owned.total or owned.length}, "
        f"{module.spec.head_dim}",
        formula=f"grad[{term}{index}] {'=' if rows else '+='} {sums} {g} * {operand}, {which} rows of a chunk.",
        g_row_shift=contraction.g_row_shift,
        g_key_shift=contraction.g_key_shift,
        sums_terms=contraction.sums_terms,
        keeps_rows=rows and contraction.sums_terms and lift.carried_rows > 0,
        operands={streamed.operand: key_tensor if rows else row_tensor},
    )


@dataclass(frozen=True)
class Finish:
    """The texts of the kernel that turns gradients of the workspace into dq or dk.

    Attributes:
        kernel: the kernel that is launched.
        owner: ``rows`` for dq, ``keys`` for dk.
        owned, other: the axis of the gradient, and the other axis.
        lifted: whether the workspace holds gradients of the lifted operand.
        grad: the host's name of the workspace's gradients.
        out: the host's name of the result.
        shape: shape of the result.
        formula: the mathematics of the kernel, for its docstring.
        tensors: the host's names of the tensors that are passed with strides, by argument.
    """

    kernel: Kernel
    owner: str
    owned: Axis
    other: Axis
    lifted: bool
    grad: str
    out: str
    shape: str
    formula: str
    tensors: Mapping[str, str]


def finish(module: LiftModule, owner: str) -> Finish:
    """Return the texts of dq, if ``owner`` is ``rows``, or of dk."""
    lift, rows = module.lift, owner == "rows"
    queries, keys = axes(module.spec)
    owned, other = (queries, keys) if rows else (keys, queries)
    lifted = rows != lift.lifts_keys
    out = f"d{owned.operand}"
    tensors = {"x": owned.operand} if lifted else {}
    tensors |= {"other": other.operand} if lift.bands else {}
    unlifted = f"scale * sum_(t, s) {weight_entry(lift)} * grad[t, {shifted('x - s', lift.pad)}]"
    formula = f"{out}[x] = {unlifted if lifted else 'ln(2) * grad[x]'}"
    return Finish(
        kernel=module.kernel(f"bwd_{out}"),
        owner=owner,
        owned=owned,
        other=other,
        lifted=lifted,
        grad=next(contraction.role for contraction in lift.contractions if contraction.owner == owner),
        out=out,
        shape=_gradient_shape(owned, "H" if rows else "Hkv", module.spec),
        formula=f"{formula}{', plus what scores on the band add' if lift.bands else ''}.",
        tensors=tensors,
    )


def _gradient_shape(owned: Axis, heads: str, spec: Spec) -> str:
    """Return the shape of the gradient of q or k."""
    axes = (owned.total, heads) if spec.packed else ("B", heads, owned.length)
    return ", ".join([*axes, str(spec.head_dim)])
