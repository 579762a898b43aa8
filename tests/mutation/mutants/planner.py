"""The planner."""

from __future__ import annotations

from ..mutant import Mutant

MUTANTS = (
    Mutant(
        "expression-text-that-changes-when-read",
        "mtagen/expressions/language.py",
        "while (text := write(expr)) not in texts:",
        "while (text := write(expr)) not in texts and not texts:",
        "A spec that is written and read again is another spec.",
        ("tests/test_expressions.py::test_canonical_texts_stay",),
    ),
    Mutant(
        "sign-of-a-part-of-the-head",
        "mtagen/planner/geometry/score.py",
        "number, fixed = sympy.sign(number), self._part(abs(number) * fixed)",
        "number, fixed = Integer(1), self._part(abs(number) * fixed)",
        "A product whose factors depend on the head loses its sign.",
        ("tests/test_expressions.py::test_parts_of_the_head",),
    ),
    Mutant(
        "part-that-depends-on-the-score",
        "mtagen/planner/geometry/score.py",
        "bool(expr.free_symbols <= self._symbols)",
        "bool(expr.free_symbols & self._symbols)",
        "A kernel would compute an exponential of the score once for all scores.",
        ("tests/test_expressions.py::test_parts_of_the_head",),
    ),
    Mutant(
        "window-starts-a-tile-early",
        "mtagen/planner/geometry/loops.py",
        "Min(end, _align_down(last_skipped + block_n, block_n))",
        "Min(end, _align_down(last_skipped + 1, block_n))",
        "A tile of keys is visited of which no row of the block sees any.",
        ("tests/test_loops.py",),
    ),
    Mutant(
        "window-ends-a-row-early",
        "mtagen/planner/geometry/loops.py",
        "Min(N_Q, root(mask.left - least, _s) + 1)",
        "Min(N_Q, root(mask.left - least, _s))",
        "The last tile of rows that see a key of the block is passed over.",
        ("tests/test_loops.py",),
    ),
    Mutant(
        "mask-asks-the-wrong-row-of-a-tile",
        "mtagen/planner/geometry/mask.py",
        "self.first_key(last_position)",
        "self.first_key(first_position)",
        "Keys that are too far back for the last rows of a tile are taken for visible.",
        ("tests/test_mask.py",),
    ),
    Mutant(
        "keys-past-the-end-of-a-window",
        "mtagen/planner/geometry/mask.py",
        "self.right is not None and self.right <= 0",
        "self.right is not None",
        "Where a query sees later keys than its own, it sees keys that do not exist.",
        ("tests/test_mask.py",),
    ),
    Mutant(
        "last-table-wins",
        "mtagen/planner/choice.py",
        "sources[key] = table.source\n                break",
        "sources[key] = table.source",
        "What was measured elsewhere is preferred to what was tuned here.",
        ("tests/test_tables.py",),
    ),
    Mutant(
        "ratios-of-any-mask",
        "mtagen/planner/choice.py",
        "(shape.mask != here.mask, _distance(shape[:3], here[:3]), shape)",
        "(_distance(shape[:3], here[:3]), shape)",
        "A causal request follows what was measured without a mask.",
        ("tests/test_choice.py",),
    ),
    Mutant(
        "measured-tile-not-among-alternatives",
        "mtagen/planner/lift/passes.py",
        "return sorted([self, *plans], key=lambda plan: plan.decision_cost(key))",
        "return plans",
        "Tuning loses the tile that is planned if the register model refuses it.",
        ("tests/test_plan.py",),
    ),
)
