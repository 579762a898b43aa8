"""Renders a Triton module: one self-contained Python file, kernels and host functions."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jinja2
import sympy
from sympy import Expr

from ..planner.geometry.affine import N_K, N_Q, Size
from ..planner.geometry.loops import Loop
from ..planner.geometry.mask import Mask
from ..planner.geometry.sequence import SEQUENCE
from ..planner.kernel import Kernel
from ..planner.lift.module import LiftModule
from ..planner.lift.operands import Contraction, Lift, T
from ..planner.lift.tiling import Tile
from ..planner.targets import get_target
from ..spec import Spec
from ..version import __version__
from .host import WIDTH, filled
from .printers import Source, triton_code, triton_host_code
from .templates import environment

_NUMBERS = ("int32", "float")  # types of arguments that stand after those that are or belong to tensors
_S, _U, _V = sympy.symbols("s u v", integer=True)  # taps of the convolution: within a term, along rows, along keys


def render(module: LiftModule) -> str:
    """Source of a module; importing it needs torch and triton only."""
    text = _environment().get_template("module.py.j2").render(_context(module))
    return _tidy(_without_unused(text))


def _signature(kernel: Kernel) -> str:
    """A kernel's decorator and first lines: tensors, numbers, constants.

    Numbers that calls change, and pointers that may be to anything, compile nothing anew.
    """
    varying = [x.name for x in kernel.arguments if x.optional or x.type in (*_NUMBERS, "int64")]
    decorator = f"@triton.jit(do_not_specialize={_names(varying)})" if varying else "@triton.jit"
    annotation = {"int64": ": tl.int64"}
    tensors = [x.name + annotation.get(x.type, "") for x in kernel.arguments if x.type not in _NUMBERS]
    values = [x.name for x in kernel.arguments if x.type in _NUMBERS]
    constants = [f"{name}: tl.constexpr = {value}" for name, value in kernel.constants]
    parameters = [line for part in (tensors, values, constants) for line in filled(part, 4)]
    return "\n".join([decorator, f"def {kernel.name}(", *parameters, "):"])


def _names(names: list[str]) -> str:
    """A list of names; a long one on lines of its own."""
    quoted = [f'"{name}"' for name in names]
    line = f"[{', '.join(quoted)}]"
    return line if len(line) < WIDTH - 40 else "\n".join(["[", *filled(quoted, 4), "]"])


def _launch(kernel: Kernel, indent: int, **values: str) -> str:
    """A launch of a kernel.

    Args:
        kernel: what is launched.
        indent: columns before it.
        values: by an argument's name, or by the tensor that its name begins with, what the host calls it, where that is
            something else.

    Raises:
        ValueError: a value is for no argument of the kernel.
    """
    tensors, numbers, known = [], [], set()
    for argument in kernel.arguments:
        tensor, _, part = argument.name.rpartition("_")
        name = argument.name
        if name not in values and (part in ("ptr", "desc") or argument.type == "int64"):
            name = tensor
        known.add(name)
        text = values.get(name, name)
        if argument.type in _NUMBERS:
            numbers.append(text)
        elif argument.type != "int64" or name != tensor:
            tensors.append(text)
        elif part == "b":  # the first of three strides
            tensors.append(f"*{text}.stride()[:3]")
    if unknown := values.keys() - known:
        raise ValueError(f"{kernel.name} has no argument {sorted(unknown)}")
    options = [f"num_warps={kernel.threads // 32}", f"num_stages={kernel.stages}", "enable_fp_fusion=True"]
    space = " " * indent
    lines = [f"{space}grid = ({triton_host_code(kernel.grid[0])},)", f"{space}{kernel.name}[grid]("]
    for texts in (tensors, numbers, options):
        lines += filled(texts, indent + 4)
    return "\n".join([*lines, f"{space})"])


def _tiles(tensor: str, rows: int, width: int) -> str:
    """The descriptor that a launch passes, of tiles of a tensor."""
    return f"_tiles({tensor}, {rows}, {width})"


class _LoopSource(NamedTuple):
    """A loop as text: assignments (name, value) before it, then its segments (begin, end, whether edge tiles)."""

    assignments: list[tuple[str, str]]
    segments: list[tuple[str, str, bool]]


def _loop_source(loop: Loop, first: str = "", last: str = "") -> _LoopSource:
    """The parts of a loop that are in [first, last), a strip of rows; the whole loop by default."""
    assignments: list[tuple[str, str]] = []
    clipped: list[tuple[str, str]] = []
    texts: dict[Expr, str] = {}
    for name, position in zip(Loop._fields, loop, strict=True):
        if position in texts:
            continue
        if position == 0:
            texts[position] = first or "0"
        elif position in (N_Q, N_K):
            texts[position] = last or triton_code(position)
        else:
            assignments.append((name, triton_code(position)))
            inside = f"tl.maximum({name}, {texts.get(loop.begin, first)})" if first else name
            inside = f"tl.minimum({inside}, {last})" if last and name != "begin" else inside
            clipped += [(name, inside)] if inside != name else []
            texts[position] = name
    segments = [(texts[begin], texts[end], edge) for begin, end, edge in loop.segments]
    return _LoopSource(assignments + clipped, segments)


@dataclass(frozen=True)
class _GradientLayout:
    """How g lies in the workspace, as texts: the axis read at shifted positions first, for the last must stay aligned.

    Attributes:
        rows_first: g is (slots, rows of a strip, keys), else (slots, keys, rows of a strip).
        kept_rows: rows of the strip before that are kept before a strip's, if rows come first.
    """

    rows_first: bool
    kept_rows: int

    @property
    def _kept(self) -> str:
        return f"{self.kept_rows} + " if self.kept_rows else ""

    @property
    def shape(self) -> str:
        """Of the workspace."""
        return f"slots, {self._kept}strip, pitch" if self.rows_first else "slots, n_k, strip"

    @property
    def strip(self) -> str:
        """Its part that one strip uses."""
        used = f": {self._kept}end - begin, :n_k" if self.rows_first else ":, : end - begin"
        return f"g[:heads, {used}]"

    @property
    def strides(self) -> Mapping[str, str]:
        """Of slots, rows and keys, by the names of arguments."""
        row, key = (1, 2) if self.rows_first else (2, 1)
        axes = {"slot": 0, "row": row, "key": key}
        return {f"g_{name}": f"g_strip.stride({axis})" for name, axis in axes.items()}

    @property
    def block(self) -> str:
        """Shape of a tile as it lies there, in a kernel."""
        return "BLOCK_M, BLOCK_N" if self.rows_first else "BLOCK_N, BLOCK_M"

    @property
    def transposed(self) -> str:
        """From a tile as it lies there to one of (rows, keys), or back."""
        return "" if self.rows_first else ".trans()"

    def tile(self, tile: Tile) -> tuple[int, int]:
        """Shape of a tile as it lies there, in numbers."""
        return (tile.block_m, tile.block_n) if self.rows_first else (tile.block_n, tile.block_m)

    def row(self, row: str) -> str:
        """Where a row of the problem lies in a strip."""
        return f"{row} - strip_begin" + (f" + {self.kept_rows}" if self.kept_rows else "")

    def position(self, row: str, key: str) -> str:
        """Where (row, key) of the problem lies in a strip."""
        return f"[slot, {self.row(row)}, {key}]" if self.rows_first else f"[slot, {key}, {self.row(row)}]"


@dataclass(frozen=True)
class _Axis:
    """What kernels and host code call one axis of the scores.

    Attributes:
        name: what the vectors along it are.
        start: the first of a tile.
        block: how many a tile has.
        length: how many there are.
        operand: the tensor that holds them.
        head: the head of that tensor that query head h reads.
    """

    name: str
    start: str
    block: str
    length: str
    operand: str
    head: str


_QUERIES = _Axis("queries", "i0", "BLOCK_M", "n_q", "q", "h")
_KEYS = _Axis("keys", "j0", "BLOCK_N", "n_k", "k", "h // group")


@dataclass(frozen=True)
class _Product:
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
        operand_tiles: the descriptor of the streamed operand, by argument.
    """

    kernel: Kernel
    tile: Tile
    owner: str
    own: _Axis
    streamed: _Axis
    own_length: str
    loop: _LoopSource
    grad: str
    shape: str
    formula: str
    g_row_shift: Expr
    g_key_shift: Expr
    sums_terms: bool
    keeps_rows: bool
    operand_tiles: Mapping[str, str]

    def steps(self, position: str) -> str:
        """Steps of the loop, each a term of a tile, before a position of the streamed axis."""
        return position if position == "0" else f"tl.cdiv({position}, {self.streamed.block}) * LOOP_TERMS"


def _product(module: LiftModule, contraction: Contraction) -> _Product:
    lift, tile = module.lift, module.tile(contraction.role)
    rows, role = contraction.owner == "rows", contraction.role
    own, streamed = (_QUERIES, _KEYS) if rows else (_KEYS, _QUERIES)
    g = f"g[{_shifted('i', contraction.g_row_shift)}, {_shifted('j', contraction.g_key_shift)}]"
    if rows:
        operand = "K_t[j]" if lift.lifts_keys else f"k[{_shifted('j', lift.key_shift)}]"
    else:
        operand = f"q[{_shifted('i', lift.row_shift)}]" if lift.lifts_keys else "Q_t[i]"
    term = "" if contraction.sums_terms else "t, "
    owned, summed = ("i", "j") if rows else ("j", "i")
    sums = f"sum_(t, {summed})" if contraction.sums_terms else f"sum_{summed}"
    which = "for" if rows else "over the"
    kernel = module.kernel(f"bwd_{role}")
    grid_terms = dict(kernel.constants)["GRID_TERMS"]
    row_tensor, key_tensor = _operands(lift)
    size = tile.block_n if rows else tile.block_m
    return _Product(
        kernel=kernel,
        tile=tile,
        owner=contraction.owner,
        own=own,
        streamed=streamed,
        own_length="row_end - row_begin" if rows else own.length,
        loop=_loop_source(contraction.loop, *(("", "") if rows else ("row_begin", "row_end"))),
        grad=role,
        shape=f"slots, {f'{grid_terms}, ' if grid_terms > 1 else ''}{own.length}, {module.spec.head_dim}",
        formula=f"grad[{term}{owned}] {'=' if rows else '+='} {sums} {g} * {operand}, {which} rows of a strip.",
        g_row_shift=contraction.g_row_shift,
        g_key_shift=contraction.g_key_shift,
        sums_terms=contraction.sums_terms,
        keeps_rows=rows and contraction.sums_terms and lift.kept_rows > 0,
        operand_tiles={f"{streamed.operand}_desc": _tiles(key_tensor if rows else row_tensor, size, module.block_d)},
    )


@dataclass(frozen=True)
class _Finish:
    """The texts of the kernel that turns gradients of the workspace into dq or dk.

    Attributes:
        kernel: what is launched.
        owner: ``rows`` for dq, ``keys`` for dk.
        own, other: the axis whose gradient it is, and the other.
        lifted: whether the gradients are those of the lifted operand.
        grad: what the host calls them.
        out: what it writes.
        heads: the first axes of that.
        formula: what it computes.
        operands: what the host calls other tensors that are passed, by argument.
        strided: strides that are passed of rows.
        band_pair: the row and the key of a score f past the edge that x is one of.
        partner: the other one.
    """

    kernel: Kernel
    owner: str
    own: _Axis
    other: _Axis
    lifted: bool
    grad: str
    out: str
    heads: str
    formula: str
    operands: Mapping[str, str]
    strided: tuple[str, ...]
    band_pair: str
    partner: str


def _finish(module: LiftModule, owner: str) -> _Finish:
    lift, rows = module.lift, owner == "rows"
    own, other = (_QUERIES, _KEYS) if rows else (_KEYS, _QUERIES)
    lifted = rows != lift.lifts_keys
    out = f"d{own.operand}"
    operands = {"x": own.operand} if lifted else {}
    operands |= {"other": other.operand} if lift.band.width else {}
    unlifted = f"scale * sum_(t, s) {_weight_entry(lift)} * grad[t, {_shifted('x - s', lift.pad)}]"
    formula = f"{out}[x] = {unlifted if lifted else 'ln(2) * grad[x]'}"
    return _Finish(
        kernel=module.kernel(f"bwd_{out}"),
        owner=owner,
        own=own,
        other=other,
        lifted=lifted,
        grad=next(one.role for one in lift.contractions if one.owner == owner),
        out=out,
        heads="B, H" if rows else "B, Hkv",
        formula=f"{formula}{', plus the share of the correction' if lift.band.width else ''}.",
        operands=operands,
        strided=tuple(f"{name}_n" for name in operands),
        band_pair="x, x + off + f" if rows else "x - off - f, x",
        partner="key" if rows else "row",
    )


def _context(module: LiftModule) -> Mapping[str, Any]:
    spec, lift = module.spec, module.lift
    row_tensor, key_tensor = _operands(lift)
    dropped = "".join(
        f" & ({triton_code(left)} {operator} {triton_code(right)})" for left, operator, right in lift.band.dropped
    )
    d_mask = _width_mask(spec.head_dim, module.block_d)
    lifting = [name for name in ("forward", "backward") if module.has(name)]
    return {
        "version": __version__,
        "module": module,
        "spec": spec,
        "cq": spec.cq,
        "ck": spec.ck,
        "pad_left": spec.pad_left,
        "pad_right": spec.pad_right,
        "head_dim": spec.head_dim,
        "value_head_dim": spec.value_head_dim,
        "lift": lift,
        "band": lift.band,
        "mask": lift.mask,
        "sequence": SEQUENCE,
        "lifts": bool(lifting),
        "passes": " and ".join(lifting).capitalize(),
        "lifted": _KEYS if lift.lifts_keys else _QUERIES,
        "row_tensor": row_tensor,
        "key_tensor": key_tensor,
        "weights": f"({spec.cq} * {spec.ck})",
        "weight_index": lambda t, s: _weight_index(spec, lift, t, s),
        "weight_entry": _weight_entry(lift),
        "u_shift": _U - (spec.cq - 1),
        "v_shift": _V - spec.pad_left,
        "s_shift": _S - lift.pad,
        "aligned": partial(_aligned, module.vector),
        "sees": partial(_sees, lift.mask),
        "last_key": lambda position: triton_code(lift.mask.last_key(Source(position))),
        "starts_first": lambda why: f"  # the longest first: {why}" if lift.mask.favours_later_rows else "",
        "minus_correction": " - correction[i + off - j, i]" if lift.band.width else "",
        "dropped_mask": dropped,
        "g_layout": _GradientLayout(lift.lifts_keys, lift.kept_rows),
        "d_mask": d_mask,
        "dv_mask": _width_mask(spec.value_head_dim, module.block_dv),
        "within": lambda condition: f"({condition}){d_mask}" if d_mask else condition,
        "dot_options": _dot_options(module),
        "contractions": [_product(module, one) for one in lift.contractions] if module.has("backward") else [],
        "finishes": [_finish(module, one) for one in ("rows", "keys")] if module.has("backward") else [],
    }


def _operands(lift: Lift) -> tuple[str, str]:
    """The tensors whose products are scores: that of the rows, that of the keys."""
    return ("q", "lifted") if lift.lifts_keys else ("lifted", "k")


def _sees(mask: Mask, position: str, key: str) -> str:
    """The condition that the query at a position sees a key; the mask hides some."""
    first, last = mask.first_key(Source(position)), mask.last_key(Source(position))
    if first is None:
        return f"{key} <= {triton_code(last)}"
    seen = f"{key} >= {triton_code(first)}"
    return seen if last is None else f"({seen}) & ({key} <= {triton_code(last)})"


def _weight_entry(lift: Lift) -> str:
    """The weight of a term's tap, in formulas."""
    return "W[t, s]" if lift.lifts_keys else "W[s, t]"


def _weight_index(spec: Spec, lift: Lift, term: object, tap: object) -> str:
    """Where W[u, v] of (term, tap) lies in a head's cq * ck weights."""
    u, v = (term, tap) if lift.lifts_keys else (tap, term)
    return f"{u} * {spec.ck} + {v}"


def _width_mask(width: int, padded: int) -> str:
    return "" if width == padded else f" & (d < {width})"


def _dot_options(module: LiftModule) -> str:
    """fp32 operands keep fp32 accuracy: three tf32 products per product on NVIDIA, plain fp32 elsewhere."""
    if module.spec.dtype != "fp32":
        return ""
    return f', input_precision="{"tf32x3" if get_target(module.target).backend == "cuda" else "ieee"}"'


def _shifted(base: str, shift: Size, term: object = "t") -> str:
    """``base + shift`` as source, with the term's name or number filled in."""
    value = sympy.sympify(term, locals={"t": T}) if isinstance(term, str) else term
    offset = sympy.sympify(shift).subs(T, value)
    if offset == 0:
        return base
    code = triton_code(offset)
    return f"{base} - {code[1:]}" if code.startswith("-") else f"{base} + {code}"


def _unrolled(*bounds: int) -> str:
    """A loop over constant bounds: unrolled, so that its loads overlap, unless that makes long code."""
    name = "tl.static_range" if len(range(*bounds)) <= 16 else "range"
    return f"{name}({', '.join(map(str, bounds))})"


def _aligned(vector: int, stride: str) -> str:
    """A number of elements that is one of whole vectors, such that the compiler knows it."""
    return f"{stride} // {vector} * {vector}"


@cache
def _environment() -> jinja2.Environment:
    templates = environment("triton")
    # A macro made of whole lines is called on a line of its own, which ends the last of them.
    templates.finalize = lambda value: value.rstrip("\n") if isinstance(value, str) else value
    templates.filters |= {
        "triton": triton_code,
        "plus": _shifted,
    }
    templates.globals |= {
        "unrolled": _unrolled,
        "signature": _signature,
        "launch": _launch,
        "loop_source": _loop_source,
        "tiles": _tiles,
        "log2e": repr(math.log2(math.e)),
        "ln2": repr(math.log(2.0)),
    }
    return templates


def _without_unused(source: str) -> str:
    """Drop plain arithmetic, such as ``h = head % n_heads``, whose name its function does not read.

    The templates define positions and offsets once for all variants, of which some need only a few.
    """
    unused: set[int] = set()  # lines
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() as value) if name not in read:
                    arithmetic = not any(isinstance(part, ast.Call) for part in ast.walk(value))
                    unused |= {node.lineno} if arithmetic else set()
    if not unused:
        return source
    lines = source.splitlines(keepends=True)
    return _without_unused("".join(line for i, line in enumerate(lines, 1) if i not in unused))


def _tidy(text: str) -> str:
    """Blank lines as a formatter leaves them: two around what stands at the left margin, at most one elsewhere."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\n+(?=(@triton\.jit|def ))", "\n\n\n", text)
    text = re.sub(r"(@triton\.jit(?:\([^()]*\))?)\n+(?=def )", r"\1\n", text)
    return text.strip() + "\n"
