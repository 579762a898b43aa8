"""Pieces of Triton source that its templates are made of, besides those in ``pieces.j2``: axes, loops, masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
from sympy import Expr, Symbol

from ..planner.geometry.affine import N_K, N_Q, Size
from ..planner.geometry.loops import OFF, Loop
from ..planner.geometry.mask import Comparison, Mask
from ..planner.lift.band import DELTA, Band, F
from ..planner.lift.module import LiftModule
from ..planner.lift.operands import Lift, T
from ..planner.strip.module import StripModule
from ..planner.targets import get_target
from ..spec import Spec
from .printers import Source, triton_code

_F0, _I0, _DIAGONALS, _REACH = sympy.symbols("f0 i0 DIAGONALS REACH", integer=True)


@dataclass(frozen=True)
class Axis:
    """What kernels and host code call one axis of the scores.

    Attributes:
        name: what the vectors along it are.
        start: the first of a tile.
        block: how many a tile has.
        length: how many there are.
        operand: the tensor that holds them.
        head: the head of that tensor that query head h reads.
        first: of packed documents, the first of the document that a program works on.
        total: how many there are of all documents.
        tiles: the schedule of tiles of documents.
    """

    name: str
    start: str
    block: str
    length: str
    operand: str
    head: str
    first: str = ""
    total: str = ""
    tiles: str = ""

    def begin(self, matrix: str, length: str = "") -> str:
        """Where those of a sequence begin in contiguous matrices, counted from the first of the first matrix."""
        return f"{matrix} * {self.total} + {self.first}" if self.first else f"{matrix} * {length or self.length}"

    def place(self, tensor: str) -> str:
        """Where those of a sequence and head begin in a tensor with strides, in elements."""
        entry = f"{self.first} * {tensor}_n" if self.first else f"b * {tensor}_b"
        return f"({entry} + {self.head} * {tensor}_h)"


_QUERIES = Axis("queries", "i0", "BLOCK_M", "n_q", "q", "h")
_KEYS = Axis("keys", "j0", "BLOCK_N", "n_k", "k", "h // group")


def axes(spec: Spec) -> tuple[Axis, Axis]:
    """The queries and the keys."""
    if not spec.packed:
        return _QUERIES, _KEYS
    return (
        replace(_QUERIES, first="first_q", total="total_q", tiles="row_tiles"),
        replace(_KEYS, first="first_k", total="total_k", tiles="key_tiles"),
    )


class LoopSource(NamedTuple):
    """A loop as text: assignments (name, value) before it, then its segments (begin, end, whether edge tiles)."""

    assignments: list[tuple[str, str]]
    segments: list[tuple[str, str, bool]]


def loop_source(loop: Loop, first: str = "", last: str = "") -> LoopSource:
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
    return LoopSource(assignments + clipped, segments)


def operands(lift: Lift) -> tuple[str, str]:
    """The tensors whose products are scores: that of the rows, that of the keys."""
    return ("q", "lifted") if lift.lifts_keys else ("lifted", "k")


def last_key(mask: Mask, position: str) -> str:
    """The last key that the query at a position sees; the mask hides later ones."""
    return triton_code(mask.last_key(Source(position)))


def first_key(mask: Mask, position: str) -> str:
    """The first key that the query at a position sees; the mask hides earlier ones."""
    return triton_code(mask.first_key(Source(position)))


def first_position(mask: Mask, key: str) -> str:
    """The first position whose query sees a key; the mask hides keys from earlier ones."""
    return triton_code(mask.first_position(Source(key)))


def last_position(mask: Mask, key: str) -> str:
    """The last position whose query sees a key; the mask hides keys from later ones."""
    return triton_code(mask.last_position(Source(key)))


def sees(mask: Mask, position: str, key: str, last_position: str = "") -> str:
    """The condition that the query at a position sees a key, or one from there up to another; the mask hides some."""
    first, last = mask.first_key(Source(position)), mask.last_key(Source(last_position or position))
    if first is None:
        return f"{key} <= {triton_code(last)}"
    seen = f"{key} >= {triton_code(first)}"
    return seen if last is None else f"({seen}) & ({key} <= {triton_code(last)})"


def diagonal_key(band: Band, row: str) -> str:
    """The key on diagonal ``delta`` of a row."""
    return triton_code(band.key(Symbol(row, integer=True) + OFF, DELTA))


def scored_key(band: Band, row: str) -> str:
    """The key on diagonal ``f`` of a row."""
    return triton_code(band.key(Symbol(row, integer=True) + OFF, band.first + F))


def window_start(band: Band) -> str:
    """The first key on the diagonals f0 <= f < f0 + DIAGONALS of the rows from ``i0`` on."""
    return triton_code(band.key(_I0 + OFF, band.first + _F0 + (_DIAGONALS - 1 if band.later else 0)))


def scored_row(band: Band, key: str) -> str:
    """The row on whose diagonal ``f`` a key is."""
    return triton_code(band.position(Symbol(key, integer=True), band.first + F) - OFF)


def tap(band: Band) -> str:
    """The column v of the weight that a term on diagonal ``f`` has in a score on diagonal ``delta``."""
    return triton_code(band.tap)


def counted_mask(band: Band) -> str:
    """Which diagonals ``f`` of the ``u``-th row have terms that count."""
    conditions = [Comparison(F, "<", _REACH), *band.counted]
    texts = [f"{triton_code(left)} {operator} {triton_code(right)}" for left, operator, right in conditions]
    return texts[0] if len(texts) == 1 else " & ".join(f"({text})" for text in texts)


def band_entry(band: Band) -> str:
    """Where C[i, j] stands if it is on the band, in formulas."""
    i, j = sympy.symbols("i j", integer=True)
    return f"band{band.suffix}[{triton_code(band.diagonal(i + OFF, j))}, i]"


def weight_entry(lift: Lift) -> str:
    """The weight of a term's tap, in formulas."""
    return "W[t, s]" if lift.lifts_keys else "W[s, t]"


def weight_index(spec: Spec, lift: Lift, term: object, tap: object) -> str:
    """Where W[u, v] of (term, tap) lies in a head's cq * ck weights."""
    u, v = (term, tap) if lift.lifts_keys else (tap, term)
    return f"{u} * {spec.ck} + {v}"


def width_mask(place: str, width: int, padded: int) -> str:
    """What a mask of vectors on chip says of a place in a vector: whether it is before the padding."""
    return "" if width == padded else f" & ({place} < {width})"


def dot_options(module: LiftModule | StripModule, dtype: str = "") -> str:
    """fp32 operands keep fp32 accuracy: three tf32 products per product on NVIDIA, plain fp32 elsewhere.

    Args:
        module: what is rendered.
        dtype: of the operands, if they are not of the request's.
    """
    if (dtype or module.spec.dtype) != "fp32":
        return ""
    return f', input_precision="{"tf32x3" if get_target(module.target).backend == "cuda" else "ieee"}"'


def shifted(base: str, shift: Size, term: object = "t") -> str:
    """``base + shift`` as source, with the term's name or number filled in."""
    value = sympy.sympify(term, locals={"t": T}) if isinstance(term, str) else term
    offset = sympy.sympify(shift).subs(T, value)
    if offset == 0:
        return base
    code = triton_code(offset)
    return f"{base} - {code[1:]}" if code.startswith("-") else f"{base} + {code}"


def unrolled(count: int) -> str:
    """The range of a loop, unrolled, so that its loads overlap, unless that makes long code."""
    return f"tl.static_range({count})" if count <= 16 else f"range({count})"


def aligned(vector: int, stride: str) -> str:
    """A number of elements that is one of whole vectors, such that the compiler knows it."""
    return f"{stride} // {vector} * {vector}"
