"""Values for the templates of Triton's backward pass: kernels for rows and for keys.

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
from .layout import Axis, Batch
from .pieces import LoopSource, loop_source, operands, shifted, weight_entry


@dataclass(frozen=True)
class Product:
    """A product of g with queries or keys, as the texts of its kernel and of its launch.

    Attributes:
        kernel, tile: the kernel that is launched, and its tile.
        owner: ``rows`` or ``keys``.
        owned, streamed: the axis of which a program owns a block, and the other axis.
        streams_lifted: whether the streamed operand is the lifted one.
        count: what the number of blocks of a launch is computed from.
        loop: the loop over the streamed axis.
        grad: the host's name of the tensor that the kernel writes.
        shape: shape of that tensor.
        formula: the mathematics of the kernel, for its docstring.
        g_row_shift, g_key_shift: shifts of g against the tile's first row and key.
        sums_terms: whether the terms are summed into one gradient.
        lag: rows of the gradient at the end of a chunk that wait for the next chunk.
        rows: the host's first row and end of the rows that a launch computes, if it owns rows.
        values: the host's names of the streamed operand and of the rows of a chunk, by argument.
    """

    kernel: Kernel
    tile: Tile
    owner: str
    owned: Axis
    streamed: Axis
    streams_lifted: bool
    count: str
    loop: LoopSource
    grad: str
    shape: str
    formula: str
    g_row_shift: Expr
    g_key_shift: Expr
    sums_terms: bool
    lag: int
    rows: str
    values: Mapping[str, str]

    def steps(self, position: str) -> str:
        """Return the number of loop steps before a position of the streamed axis; a step is a
        tile's term.
        """
        return position if position == "0" else f"tl.cdiv({position}, {self.streamed.block}) * LOOP_TERMS"


def product(module: LiftModule, layout: Batch, contraction: Contraction) -> Product:
    """Return the texts of a contraction."""
    lift, tile = module.lift, module.tile(contraction.role)
    rows, role = contraction.owner == "rows", contraction.role
    queries, keys = layout.queries, layout.keys
    owned, streamed = (queries, keys) if rows else (keys, queries)
    lag = lift.carried_rows if rows and contraction.sums_terms else 0
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
        streams_lifted=rows == lift.lifts_keys,
        count=owned.count_between("row_begin", "row_end") if rows else owned.count,
        loop=loop_source(contraction.loop, *(("", "") if rows else ("row_begin", "row_end"))),
        grad=role,
        shape=f"slots, {f'{grid_terms}, ' if grid_terms > 1 else ''}{owned.total}, {module.spec.head_dim}",
        formula=f"grad[{term}{index}] {'=' if rows else '+='} {sums} {g} * {operand}, {which} rows of a chunk.",
        g_row_shift=contraction.g_row_shift,
        g_key_shift=contraction.g_key_shift,
        sums_terms=contraction.sums_terms,
        lag=lag,
        rows=layout.gradient.rows(lag) if rows else "",
        values={streamed.operand: key_tensor, "row_begin": "first", "row_end": "last"}
        if rows
        else {streamed.operand: row_tensor, "strip_end": "end"},
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


def finish(module: LiftModule, layout: Batch, owner: str) -> Finish:
    """Return the texts of dq, if ``owner`` is ``rows``, or of dk."""
    lift, rows = module.lift, owner == "rows"
    queries, keys = layout.queries, layout.keys
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
        shape=f"{owned.shape('H' if rows else 'Hkv')}, {module.spec.head_dim}",
        formula=f"{formula}{', plus what scores on the band add' if lift.bands else ''}.",
        tensors=tensors,
    )
