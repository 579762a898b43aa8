"""Renders a Triton module: one self-contained Python file, kernels and host functions."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jinja2
import sympy
from sympy import Expr

from ..planner.geometry.affine import N_K, N_Q
from ..planner.geometry.loops import Loop
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


def render(module: LiftModule) -> str:
    """Source of a module; importing it needs torch and triton only."""
    text = _environment().get_template("module.py.j2").render(_context(module))
    return _tidy(_without_unused(text))


def _signature(kernel: Kernel) -> str:
    """A kernel's decorator and first lines. Numbers that calls change, or a pointer's address, compile nothing anew."""
    numbers = ("int32", "int64", "float")
    varying = [argument.name for argument in kernel.arguments if argument.optional or argument.type in numbers]
    decorator = f"@triton.jit(do_not_specialize={_names(varying)})" if varying else "@triton.jit"
    parameters = [f"{x.name}: tl.int64" if x.type == "int64" else x.name for x in kernel.arguments]
    constants = [f"{name}: tl.constexpr = {value}" for name, value in kernel.constants]
    return "\n".join([decorator, f"def {kernel.name}(", *filled(parameters, 4), *filled(constants, 4), "):"])


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
    """
    texts, given = [], set()
    for argument in kernel.arguments:
        tensor, _, part = argument.name.rpartition("_")
        name = tensor if part in ("ptr", "desc") or argument.type == "int64" else argument.name
        name = argument.name if argument.name in values else name
        given.add(name)
        if argument.type == "int64" and name == tensor:
            if part == "b":  # the first of three
                texts.append(f"*{values.get(name, name)}.stride()[:3]")
        else:
            texts.append(values.get(name, name))
    if unknown := values.keys() - given:
        raise ValueError(f"{kernel.name} has no argument {sorted(unknown)}")
    warps = kernel.threads // 32
    options = [f"num_warps={warps}", f"num_stages={kernel.stages}", "enable_fp_fusion=True"]
    space = " " * indent
    lines = [f"{space}{kernel.name}[({triton_host_code(kernel.grid[0])},)]("]
    return "\n".join([*lines, *filled([*texts, *options], indent + 4), f"{space})"])


class _LoopSource(NamedTuple):
    """A loop as text: assignments (name, value) before it, then its segments (begin, end, whether edge tiles)."""

    assignments: list[tuple[str, str]]
    segments: list[tuple[str, str, bool]]


def _loop_source(loop: Loop, first: str = "", last: str = "") -> _LoopSource:
    """The parts of a loop that are in [first, last), a strip of rows; the whole loop by default."""
    assignments: list[tuple[str, str]] = []
    texts: dict[Expr, str] = {}
    for name, position in zip(Loop._fields, loop, strict=True):
        if position in texts:
            continue
        code = triton_code(position)
        if position == 0:
            code = first or code
        elif position in (N_Q, N_K):
            code = last or code
        else:
            if first:
                code = f"tl.maximum({code}, {texts.get(loop.begin, first)})"
            if last and name != "begin":
                code = f"tl.minimum({code}, {last})"
            assignments.append((name, code))
            code = name
        texts[position] = code
    return _LoopSource(assignments, [(texts[begin], texts[end], edge) for begin, end, edge in loop.segments])


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

    def tile(self, tile: Tile) -> str:
        """Shape of a tile as it lies there, in numbers."""
        rows, keys = tile.block_m, tile.block_n
        return f"{rows}, {keys}" if self.rows_first else f"{keys}, {rows}"

    def position(self, row: str, key: str) -> str:
        """Where (row, key) of the problem lies in a strip."""
        if self.rows_first:
            kept = f" + {self.kept_rows}" if self.kept_rows else ""
            return f"[slot, {row} - strip_begin{kept}, {key}]"
        return f"[slot, {key}, {row} - strip_begin]"


def _context(module: LiftModule) -> Mapping[str, Any]:
    spec, lift = module.spec, module.lift
    row_tensor, key_tensor = _operands(lift)
    dropped = "".join(
        f" & ({triton_code(left)} {operator} {triton_code(right)})" for left, operator, right in lift.band.dropped
    )
    return {
        "version": __version__,
        "module": module,
        "spec": spec,
        "lift": lift,
        "band": lift.band,
        "mask": lift.mask,
        "sequence": SEQUENCE,
        "lifted_name": "keys" if lift.lifts_keys else "queries",
        "source": "k" if lift.lifts_keys else "q",
        "lifted_length": "n_k" if lift.lifts_keys else "n_q",
        "row_tensor": row_tensor,
        "key_tensor": key_tensor,
        "weight_index": lambda t, s: _weight_index(spec, lift, t, s),
        "dropped_mask": dropped,
        "g_layout": _GradientLayout(lift.lifts_keys, lift.kept_rows),
        "d_mask": _width_mask(spec.head_dim, module.block_d),
        "dv_mask": _width_mask(spec.value_head_dim, module.block_dv),
        "dot_options": _dot_options(module),
        "contractions": [_contraction(module, one) for one in lift.contractions] if module.has("backward") else [],
        "finishes": [_finish(lift, owner) for owner in ("rows", "keys")],
    }


def _operands(lift: Lift) -> tuple[str, str]:
    """The tensors whose products are scores: that of the rows, that of the keys."""
    return ("q", "lifted") if lift.lifts_keys else ("lifted", "k")


def _weight_index(spec: Spec, lift: Lift, term: object, tap: object) -> str:
    """Where W[u, v] of (term, tap) lies in a head's cq * ck weights."""
    u, v = (term, tap) if lift.lifts_keys else (tap, term)
    if isinstance(u, int):
        return f"{u * spec.ck} + {v}" if u else str(v)
    return f"{u} * {spec.ck} + {v}"


def _width_mask(width: int, padded: int) -> str:
    return "" if width == padded else f" & (d < {width})"


def _dot_options(module: LiftModule) -> str:
    """fp32 operands keep fp32 accuracy: three tf32 products per product on NVIDIA, plain fp32 elsewhere."""
    if module.spec.dtype != "fp32":
        return ""
    return f', input_precision="{"tf32x3" if get_target(module.target).backend == "cuda" else "ieee"}"'


def _contraction(module: LiftModule, contraction: Contraction) -> Mapping[str, Any]:
    """The texts that turn a contraction into a kernel and its launch."""
    lift, tile = module.lift, module.tile(contraction.role)
    row_tensor, key_tensor = _operands(lift)
    rows = contraction.owner == "rows"
    kernel = module.kernel(f"bwd_{contraction.role}")
    constants = dict(kernel.constants)
    g = f"g[{_shifted('i', contraction.g_row_shift)}, {_shifted('j', contraction.g_key_shift)}]"
    operand = (
        ("Khat_t[j]" if lift.lifts_keys else f"k[{_shifted('j', lift.key_shift)}]")
        if rows
        else (f"q[{_shifted('i', lift.row_shift)}]" if lift.lifts_keys else "Qhat_t[i]")
    )
    index = ("" if contraction.sums_terms else "t, ") + ("i" if rows else "j")
    summed = ("t, " if contraction.sums_terms else "") + ("j" if rows else "i")
    formula = f"grad[{index}] {'=' if rows else '+='} sum_({summed}) {g} * {operand}, over a strip of rows of g."
    return {
        "kernel": kernel,
        "grad": contraction.role,
        "owner": contraction.owner,
        "tile": tile,
        "loop": _loop_source(contraction.loop, *(("", "") if rows else ("row_begin", "row_end"))),
        "g_row_shift": contraction.g_row_shift,
        "g_key_shift": contraction.g_key_shift,
        "grid_terms": constants["GRID_TERMS"],
        "keeps_rows": rows and contraction.sums_terms and lift.kept_rows > 0,
        "operand": "k" if rows else "q",
        "operand_tensor": key_tensor if rows else row_tensor,
        "stream_position": "j0" if rows else "i0",
        "stream_block": "BLOCK_N" if rows else "BLOCK_M",
        "stream_size": tile.block_n if rows else tile.block_m,
        "length": "n_q" if rows else "n_k",
        "formula": formula,
    }


def _finish(lift: Lift, owner: str) -> Mapping[str, Any]:
    """The texts of the kernel that turns workspace gradients into dq or dk."""
    rows = owner == "rows"
    lifted = rows != lift.lifts_keys
    contraction = next(c for c in lift.contractions if c.owner == owner)
    parts = [
        f"scale * sum_(t, s) W[t, s] grad[t, x - s + {lift.pad}]" if lifted else "sum_t grad_t[x], as summed before",
        *(["the share of the band's correction"] if lift.band.width else []),
    ]
    operands = {"x": "q" if rows else "k"} if lifted else {}
    operands |= {"other": "k" if rows else "q"} if lift.band.width else {}
    formula = f"{'dq' if rows else 'dk'}[x] = {', plus '.join(parts)}{'; partial sums of dW' if lifted else ''}."
    return {
        "name": "bwd_dq" if rows else "bwd_dk",
        "lifted": lifted,
        "formula": formula,
        "grad": contraction.role,
        "operands": operands,
        "operand_head": "h" if rows else "(h // group)",
        "out": "dq" if rows else "dk",
        "other_head": "(h // group)" if rows else "h",
        "length": "n_q" if rows else "n_k",
        "other_length": "n_k" if rows else "n_q",
        "slots": "range(owner, owner + 1)" if rows else "range(owner * group, (owner + 1) * group)",
        "first_owner": "head0" if rows else "(head0 // group)",
        "band_row": "x" if rows else "x - off - f",
        "band_other": "x + off + f" if rows else "x - off - f",
    }


def _shifted(base: str, shift: Expr, term: object = "t") -> str:
    """``base + shift`` as source, with the term's name or number filled in."""
    symbols = {"t": T}
    value = sympy.sympify(term, locals=symbols) if isinstance(term, str) else term
    return triton_code(sympy.Symbol(base, integer=True) + shift.subs(T, value))


def _unrolled(*bounds: int) -> str:
    """A loop over constant bounds: unrolled, so that its loads overlap, unless that makes long code."""
    name = "tl.static_range" if len(range(*bounds)) <= 16 else "range"
    return f"{name}({', '.join(map(str, bounds))})"


@cache
def _environment() -> jinja2.Environment:
    templates = environment("triton")
    templates.filters |= {
        "triton": triton_code,
        "source": Source,
        "plus": _shifted,
    }
    templates.globals |= {
        "unrolled": _unrolled,
        "signature": _signature,
        "launch": _launch,
        "loop_source": _loop_source,
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
    text = re.sub(r"(?<=:)\n\n(?=[ \t])", "\n", text)
    text = re.sub(r"\n+(?=(@triton\.jit|def ))", "\n\n\n", text)
    text = re.sub(r"(@triton\.jit(?:\([^()]*\))?)\n+(?=def )", r"\1\n", text)
    return text.strip() + "\n"
