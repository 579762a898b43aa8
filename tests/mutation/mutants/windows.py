"""Windows."""

from __future__ import annotations

from ..mutant import EMULATED, Mutant

MUTANTS = (
    Mutant(
        "lift-earlier-band-one-short",
        "mtagen/planner/lift/band.py",
        "width = -least if across is None else min(-least, across + 1)",
        "width = -least - (not later) if across is None else min(-least, across + 1)",
        "A diagonal next to the first key that is seen keeps terms that the mask drops.",
        ("tests/test_stencil.py",),
    ),
    Mutant(
        "lift-interiors-overlap",
        "mtagen/planner/lift/operands.py",
        "interior_begin = Max(begin, Min(interior_begin, interior_end))",
        "interior_begin = Max(begin, interior_begin)",
        "In a narrow window tiles are contracted twice, as edge tiles of both ends.",
        ("tests/test_plan.py::test_contractions_visit_what_they_need",),
    ),
    Mutant(
        "tile-window-without-its-halo",
        "mtagen/planner/tile/loops.py",
        "+ N_K - N_Q - self.spec.pad_left)",
        "+ N_K - N_Q + 8)",
        "Keys are skipped that the first rows of a CTA see.",
        (f"{EMULATED}::test_windows",),
    ),
    Mutant(
        "backward-window-ends-early",
        "mtagen/planner/tile/loops.py",
        "sympy.Min(N_Q, position - _OFFSET + 1)",
        "sympy.Min(N_Q, position - _OFFSET - 31)",
        "The last rows that see a key add nothing to its gradient.",
        (f"{EMULATED}::test_windows",),
    ),
    Mutant(
        "decode-window-one-key-late",
        "mtagen/planner/tile/decode.py",
        "self.mask.begin(_FIRST_POSITION)",
        "self.mask.begin(_FIRST_POSITION + 1)",
        "The first new token misses the first key of its window.",
        (f"{EMULATED}::test_windows",),
    ),
)
