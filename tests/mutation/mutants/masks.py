"""Masks that are runs of keys: conditions, bounds and tables."""

from __future__ import annotations

from ..mutant import TRITON, Mutant

BOUNDS, TABLES = "mtagen/expressions/bounds.py", "mtagen/ops/mask_tables.py"
TESTS, INTERPRETED = "tests/test_visible.py", "tests/interpreter/test_visible.py"

MUTANTS = (
    Mutant(
        "mask-strict-comparison",
        BOUNDS,
        "return self._where_not_positive(below + 1, condition)",
        "return self._where_not_positive(below, condition)",
        "A key that a condition with < hides is seen.",
        (f"{TESTS}::test_reference_hides_what_the_condition_hides",),
    ),
    Mutant(
        "mask-union-of-any-runs",
        BOUNDS,
        "if one.lasts == other.lasts:",
        "if True:",
        "Two runs of keys with a gap are taken for one.",
        (f"{TESTS}::test_masks_that_are_refused", f"{TESTS}::test_canonical_masks_hide_the_same"),
    ),
    Mutant(
        "mask-bound-that-the-window-does-not-imply",
        BOUNDS,
        "if left is None or span.low < left)",
        "if left is None or span.high < left)",
        "A bound that hides keys in the window is dropped.",
        (f"{TESTS}::test_reference_hides_what_the_condition_hides",),
    ),
    Mutant(
        "mask-window-without-that-of-the-bounds",
        "mtagen/eager.py",
        "forbidden |= after < -spec.left if spec.left is not None else False",
        "forbidden |= after < -window[0] if window[0] >= 0 else False",
        "The reference lacks a bound of the condition that is a distance.",
        (f"{TESTS}::test_reference_hides_what_the_condition_hides",),
    ),
    Mutant(
        "mask-of-another-entry",
        "mtagen/cpu/pipeline.py",
        "entry = place.entries[0]",
        "entry = torch.zeros_like(place.entries[0])",
        "All batch entries have the mask of the first.",
        (f"{TESTS}::test_equals_reference",),
    ),
    Mutant(
        "mask-tables-past-the-keys",
        TABLES,
        "last = rows.keys - 1 if last is None else torch.minimum(last, rows.keys - 1)",
        "last = rows.keys - 1 if last is None else last",
        "Kernels take in keys that do not exist, or those of the next document.",
        (f"{INTERPRETED}::test_batch", f"{INTERPRETED}::test_packed_documents"),
    ),
    Mutant(
        "mask-tables-without-the-window",
        TABLES,
        "first = torch.maximum(first, rows.positions - spec.left)",
        "pass",
        "Kernels see keys before the window.",
        (f"{INTERPRETED}::test_batch",),
    ),
    Mutant(
        "mask-rows-of-keys-by-the-last-row",
        TABLES,
        "latest = torch.where(sees, last + rows.begin, -1).cummax(-1).values",
        "latest = torch.where(sees, last + rows.begin, -1)",
        "Gradients of keys lack rows that see them, if later rows see fewer keys.",
        (f"{INTERPRETED}::test_batch",),
    ),
    Mutant(
        "mask-interior-of-the-least-row",
        "mtagen/planner/geometry/loops.py",
        "Min(Max(begin, _align_up(MOST_FIRST, block_n)), interior_end)",
        "Min(Max(begin, _align_up(LEAST_FIRST, block_n)), interior_end)",
        "Tiles in which some row sees no key before another's first are not checked.",
        (f"{INTERPRETED}::test_tiles_that_some_rows_see_in_part",),
    ),
    Mutant(
        "mask-tables-from-the-first-key-of-the-sequence",
        f"{TRITON}/score.j2",
        "return (first - key0)[:, None], (last - key0)[:, None]",
        "return first[:, None], last[:, None]",
        "In a window, strips count the keys of tables from another key than those of planes.",
        (f"{INTERPRETED}::test_batch",),
    ),
    Mutant(
        "mask-tables-of-new-rows-only",
        TABLES,
        "positions = keys - rows_of_step + torch.arange(rows_of_step, device=device)",
        "positions = keys - 1 - torch.arange(rows_of_step, device=device)",
        "A step's rows have the masks of others.",
        (f"{INTERPRETED}::test_batch",),
    ),
)
