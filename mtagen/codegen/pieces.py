"""Pieces of Triton source for its templates, besides those in ``pieces.j2``: loops, masks."""

from __future__ import annotations

from collections.abc import Sequence
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


class SegmentSource(NamedTuple):
    """A part of a loop as text.

    Attributes:
        begin, end: where it begins and ends.
        edge: whether pairs are checked.
        is_short: whether pairs are checked, and the loop has another part without checks, so that this part
            has few tiles.
    """

    begin: str
    end: str
    edge: bool
    is_short: bool


class LoopSource(NamedTuple):
    """A loop as text: assignments (name, value), then segments."""

    assignments: list[tuple[str, str]]
    segments: list[SegmentSource]

    @property
    def has_edges(self) -> bool:
        """Whether pairs of some tiles are checked."""
        return any(segment.edge for segment in self.segments)


def loop_source(loop: Loop, first: str = "", last: str = "") -> LoopSource:
    """Return a loop as text, clipped to the rows [first, last) of a chunk if these are given."""
    assignments: list[tuple[str, str]] = []
    clipped: list[tuple[str, str]] = []
    texts: dict[Expr, str] = {}
    for name, position in zip(loop.names, loop, strict=True):
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
    has_interior = not all(edge for *_, edge in loop.segments)
    segments = [
        SegmentSource(texts[begin], texts[end], edge, edge and has_interior) for begin, end, edge in loop.segments
    ]
    return LoopSource(assignments + clipped, segments)


def operands(lift: Lift) -> tuple[str, str]:
    """Return the host's names of the tensors whose products are scores: of the rows and of the
    keys.
    """
    return ("q", "lifted") if lift.lifts_keys else ("lifted", "k")


def last_key(mask: Mask, position: str) -> str:
    """Return the last key that the query at a position sees, for a mask that hides later keys."""
    return triton_code(mask.last_key(Source(position)))


def first_key(mask: Mask, position: str) -> str:
    """Return the first key that the query at a position sees, for a mask that hides earlier keys."""
    return triton_code(mask.first_key(Source(position)))


def first_position(mask: Mask, key: str) -> str:
    """Return the first position whose query sees a key, for a mask that hides later keys."""
    return triton_code(mask.first_position(Source(key)))


def last_position(mask: Mask, key: str) -> str:
    """Return the last position whose query sees a key, for a mask that hides earlier keys."""
    return triton_code(mask.last_position(Source(key)))


def exists(mask: Mask, key: str, n_k: str) -> str:
    """Return the condition that a key is before the end of the keys, or no query of the sequence
    sees it.
    """
    return "True" if mask.bounds_keys else f"{key} < {n_k}"


def visible_of(mask: Mask, n_k: str, position: str, key: str) -> str:
    """Return the condition that the query at a position sees a key, and the key is before n_k."""
    if mask.is_tabulated:
        return visible(mask, position, key)
    first, last = mask.first_key(Source(position)), mask.last_key(Source(position))
    if last is None:
        seen = Comparison(Source(key), "<", Source(n_k))
    else:
        seen = Comparison(Source(key), "<=", sympy.Min(last, Source(n_k) - 1))
    return all_of([seen] if first is None else [seen, Comparison(Source(key), ">=", first)])


def comparison(value: Comparison) -> str:
    """Return a comparison as source."""
    return f"{triton_code(value.left)} {value.operator} {triton_code(value.right)}"


def all_of(comparisons: Sequence[Comparison]) -> str:
    """Return the condition that all comparisons hold."""
    texts = [comparison(value) for value in comparisons]
    return texts[0] if len(texts) == 1 else " & ".join(f"({text})" for text in texts) or "True"


def visible(mask: Mask, position: str, key: str, last_position: str = "") -> str:
    """Return the condition that the query at a position sees a key that exists.

    With ``last_position`` the condition is that any query from ``position`` to there sees the key. For a
    mask in tables, ``position`` is the pair of the first and the last key that the query sees. For a
    condition, it is a pair: that pair, and what the condition needs of the query.
    """
    if mask.condition:
        return f"({key} >= {position}[0][0]) & ({key} <= {position}[0][1]) & _meets({position}[1], {key})"
    if mask.is_tabulated:
        return f"({key} >= {position}[0]) & ({key} <= {position}[1])"
    return all_of(mask.visible(Source(position), Source(key), Source(last_position or position)))


def diagonal_key(band: Band, row: str) -> str:
    """Return the key on diagonal ``delta`` of a row."""
    return triton_code(band.key(Symbol(row, integer=True) + OFF, DELTA))


def scored_key(band: Band, row: str) -> str:
    """Return the key on diagonal ``f`` of a row."""
    return triton_code(band.key(Symbol(row, integer=True) + OFF, band.first + F))


def window_start(band: Band) -> str:
    """Return the first key on the diagonals f0 <= f < f0 + DIAGONALS of the rows from ``i0`` on."""
    return triton_code(band.key(_I0 + OFF, band.first + _F0 + (_DIAGONALS - 1 if band.later else 0)))


def scored_row(band: Band, key: str) -> str:
    """Return the row whose diagonal ``f`` has a key."""
    return triton_code(band.position(Symbol(key, integer=True), band.first + F) - OFF)


def tap(band: Band) -> str:
    """Return the weight's column v for a term on diagonal ``f`` of a score on diagonal ``delta``."""
    return triton_code(band.tap)


def counted_mask(band: Band) -> str:
    """Return the condition that a term on diagonal ``f`` of the ``u``-th row counts."""
    return all_of([Comparison(F, "<", _REACH), *band.counted])


def band_entry(band: Band) -> str:
    """Return the entry of the band that is C[i, j], for formulas in comments."""
    i, j = sympy.symbols("i j", integer=True)
    return f"band{band.suffix}[{triton_code(band.diagonal(i + OFF, j))}, i]"


def weight_entry(lift: Lift) -> str:
    """Return the weight of a term's tap, for formulas in comments."""
    return "W[t, s]" if lift.lifts_keys else "W[s, t]"


def weight_index(spec: Spec, lift: Lift, term: object, tap: object) -> str:
    """Return the index of W[u, v], given as (term, tap), in a head's cq * ck weights."""
    u, v = (term, tap) if lift.lifts_keys else (tap, term)
    return f"{u} * {spec.ck} + {v}"


def width_mask(index: str, width: int, padded: int) -> str:
    """Return the part of a mask that excludes the padding of vectors; empty if there is no padding."""
    return "" if width == padded else f" & ({index} < {width})"


def dot_options(module: LiftModule | StripModule, dtype: str = "") -> str:
    """Return the options of ``tl.dot`` that give fp32 operands fp32 accuracy; empty for other
    dtypes.

    They are three tf32 products per product on NVIDIA GPUs, and plain fp32 elsewhere.

    Args:
        module: the module that is rendered.
        dtype: dtype of the operands, if it differs from the request's.
    """
    if (dtype or module.spec.dtype) != "fp32":
        return ""
    return f', input_precision="{"tf32x3" if get_target(module.target).backend == "cuda" else "ieee"}"'


def shifted(base: str, shift: Size, term: object = "t") -> str:
    """Return ``base + shift`` as source, with the term's name or number filled in."""
    value = sympy.sympify(term, locals={"t": T}) if isinstance(term, str) else term
    offset = sympy.sympify(shift).subs(T, value)
    if offset == 0:
        return base
    code = triton_code(offset)
    return f"{base} - {code[1:]}" if code.startswith("-") else f"{base} + {code}"


def unrolled(count: int) -> str:
    """Return the range of a loop: unrolled, so that its loads overlap, up to 16 steps."""
    return f"tl.static_range({count})" if count <= 16 else f"range({count})"


def aligned(vector: int, stride: str) -> str:
    """Return a stride as a multiple of whole vectors, so that the compiler can see that it is one."""
    return f"{stride} // {vector} * {vector}"
