"""Renders the Triton module of a plan: one self-contained Python file, kernels and host functions."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
import sympy
from sympy import Expr

from ..errors import PlanError, explain
from ..planner.lift.operands import Contraction, Lift, T
from ..planner.lift.tiling import Tile
from ..planner.plan import Plan
from ..planner.targets import get_target
from ..spec import Spec
from ..version import __version__
from .printers import triton_code
from .templates import environment


def render(plan: Plan) -> str:
    """Source of the plan's module; importing it needs torch and triton only.

    Raises:
        PlanError: the plan's backend has no source to render.
    """
    if not plan.tiles:
        raise PlanError(explain("backend", plan.backend, "has no Triton source", "backend='triton'"))
    text = _environment().get_template("module.py.j2").render(_context(plan))
    return _tidy(_without_unused(text))


@dataclass(frozen=True)
class _Segment:
    """One loop over streamed tiles, from ``begin`` to ``end``; ``masked`` if some pairs of a tile may be disallowed."""

    begin: str
    end: str
    masked: bool


@dataclass(frozen=True)
class _GradientLayout:
    """How g lies in the workspace, as texts: the axis read at shifted positions first, for the last must stay aligned.

    Attributes:
        rows_first: g is (slots, rows of a strip, keys), else (slots, keys, rows of a strip).
        carry: rows of the strip before that are kept before a strip's, if rows come first.
    """

    rows_first: bool
    carry: int

    @property
    def _kept(self) -> str:
        return f"{self.carry} + " if self.carry else ""

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
    def strides(self) -> str:
        """Of slots, rows and keys."""
        return "*g_strip.stride()" if self.rows_first else "g_strip.stride(0), g_strip.stride(2), g_strip.stride(1)"

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
            kept = f" + {self.carry}" if self.carry else ""
            return f"[slot, {row} - strip_begin{kept}, {key}]"
        return f"[slot, {key}, {row} - strip_begin]"


def _context(plan: Plan) -> Mapping[str, Any]:
    spec, lift = plan.spec, plan.lift
    row_tensor, key_tensor = _operands(lift)
    return {
        "version": __version__,
        "plan": plan,
        "spec": spec,
        "lift": lift,
        "lifted_name": "keys" if lift.lifts_keys else "queries",
        "source": "k" if lift.lifts_keys else "q",
        "lifted_length": "n_k" if lift.lifts_keys else "n_q",
        "row_tensor": row_tensor,
        "key_tensor": key_tensor,
        "weight_index": lambda t, s: _weight_index(spec, lift, t, s),
        "diagonal": sympy.Symbol("v", integer=True) - sympy.Symbol("u", integer=True) + (spec.cq - 1 - spec.pad_left),
        "dropped_mask": f" & (v - {spec.pad_left} > delta)" if spec.mask == "output" else "",
        "g_layout": _GradientLayout(lift.lifts_keys, lift.carry),
        "d_mask": _width_mask(spec.head_dim, plan.block_d),
        "dv_mask": _width_mask(spec.value_head_dim, plan.block_dv),
        "dot_options": _dot_options(plan),
        "contractions": [_contraction(plan, contraction) for contraction in lift.contractions],
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


def _dot_options(plan: Plan) -> str:
    """fp32 operands keep fp32 accuracy: three tf32 products per product on NVIDIA, plain fp32 elsewhere."""
    if plan.spec.dtype != "fp32":
        return ""
    return f', input_precision="{"tf32x3" if get_target(plan.target).backend == "cuda" else "ieee"}"'


def _contraction(plan: Plan, contraction: Contraction) -> Mapping[str, Any]:
    """The texts that turn a contraction into a kernel and its launch."""
    lift, tile = plan.lift, plan.tile(contraction.role)
    row_tensor, key_tensor = _operands(lift)
    rows = contraction.owner == "rows"
    segments: tuple[_Segment, ...]
    if plan.spec.causal:
        segments = (
            (_Segment("0", "interior_end", False), _Segment("interior_end", "end", True))
            if rows
            else (_Segment("begin", "interior_begin", True), _Segment("interior_begin", "row_end", False))
        )
    else:
        segments = (_Segment("0", "n_k", False),) if rows else (_Segment("row_begin", "row_end", False),)
    grid_terms = 1 if contraction.sums_terms else lift.terms
    blocks = f"triton.cdiv(last - first, {tile.block_m})" if rows else f"triton.cdiv(n_k, {tile.block_n})"
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
        "name": f"bwd_{contraction.role}",
        "grad": contraction.role,
        "owner": contraction.owner,
        "tile": tile,
        "bounds": contraction.bounds,
        "segments": segments,
        "g_row_shift": contraction.g_row_shift,
        "g_key_shift": contraction.g_key_shift,
        "grid_terms": grid_terms,
        "loop_terms": lift.terms // grid_terms,
        "carries": rows and contraction.sums_terms and lift.carry > 0,
        "grid": f"{blocks} * heads" + (f" * {grid_terms}" if grid_terms > 1 else ""),
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
        *(["the share of the band's correction"] if lift.band_width else []),
    ]
    formula = f"{'dq' if rows else 'dk'}[x] = {', plus '.join(parts)}{'; partial sums of dW' if lifted else ''}."
    return {
        "name": "bwd_dq" if rows else "bwd_dk",
        "lifted": lifted,
        "formula": formula,
        "grad": contraction.role,
        "operand": "q" if rows else "k",
        "operand_head": "h" if rows else "(h // group)",
        "out": "dq" if rows else "dk",
        "other": "k" if rows else "q",
        "other_head": "(h // group)" if rows else "h",
        "length": "n_q" if rows else "n_k",
        "other_length": "n_k" if rows else "n_q",
        "slots": "range(owner, owner + 1)" if rows else "range(owner * group, (owner + 1) * group)",
        "first_owner": "head0" if rows else "(head0 // group)",
        "owners": "heads" if rows else "(heads // group)",
        "band_row": "x" if rows else "x - off - f",
        "band_other": "x + off + f" if rows else "x - off - f",
    }


def _shifted(base: str, shift: Expr, term: object = "t") -> str:
    """``base + shift`` as source, with the term's name or number filled in."""
    symbols = {"t": T}
    value = sympy.sympify(term, locals=symbols) if isinstance(term, str) else term
    return triton_code(sympy.Symbol(base, integer=True) + shift.subs(T, value))


def _launch_options(tile: Tile) -> str:
    """Launch keywords; a pipeline over terms has its own loop, so the tile loop is left alone."""
    stages = 1 if tile.pipeline == "terms" else tile.num_stages
    return f"num_warps={tile.num_warps}, num_stages={stages}, enable_fp_fusion=True"


def _loop(*bounds: int) -> str:
    """A loop over constant bounds: unrolled, so that its loads overlap, unless that makes long code."""
    name = "tl.static_range" if len(range(*bounds)) <= 16 else "range"
    return f"{name}({', '.join(map(str, bounds))})"


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@cache
def _environment() -> jinja2.Environment:
    templates = environment("triton")
    templates.filters |= {
        "triton": triton_code,
        "plus": _shifted,
        "launch_options": _launch_options,
        "next_power_of_2": _next_power_of_2,
    }
    templates.globals |= {"loop": _loop, "log2e": repr(math.log2(math.e)), "ln2": repr(math.log(2.0))}
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
    """Blank lines as a formatter would leave them: none inside a block of code, two between functions."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{2,}(?=[ \t])", "\n", text)
    text = re.sub(r"\n+(?=(@triton\.jit|def ))", "\n\n\n", text)
    text = re.sub(r"(@triton\.jit[^\n]*)\n+(?=def )", r"\1\n", text)
    return text.strip() + "\n"
