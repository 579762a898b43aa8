"""What is next to the mask's edges: two spellings of one mask, scores of the band, and passes that round alike."""

from __future__ import annotations

from ..mutant import INTERPRETED, TRITON, Mutant

BAND, LIFTING, TILES = "mtagen/planner/lift/band.py", "mtagen/cpu/lifting.py", "mtagen/cpu/attention.py"
HIDDEN, INTERPRETED_HIDDEN = "tests/test_hidden.py", "tests/interpreter/test_hidden.py"

MUTANTS = (
    Mutant(
        "spec-keeps-two-spellings-of-a-mask",
        "mtagen/spec.py",
        "if self.causal or right == 0:",
        "if self.causal:",
        "A window that ends at a query's own position is another spec than a causal mask.",
        ("tests/test_mask.py::test_two_spellings_of_a_mask_are_one_spec",),
    ),
    Mutant(
        "cpu-tiles-see-later-keys",
        TILES,
        "if spec.right is not None and place.corner < scores.shape[2] - 1:",
        "if spec.right and place.corner < scores.shape[2] - 1:",
        "Rows see all keys of the tiles on the diagonal.",
        ("tests/test_cpu.py",),
    ),
    Mutant(
        "cpu-band-subtracted",
        TILES,
        "diagonal.copy_(entry)",
        "diagonal.sub_(diagonal - entry)",
        "A hidden key leaves the rounding errors of its own size in scores of rows that do not see it.",
        (f"{HIDDEN}::test_training",),
    ),
    Mutant(
        "cpu-band-counted-by-both",
        TILES,
        "diagonal.zero_()",
        "",
        "Gradients of scores on the band reach the lifted operands, too.",
        ("tests/test_cpu.py",),
    ),
    Mutant(
        "cpu-band-multiplies-hidden-scores-by-zero",
        LIFTING,
        "windows = windows.masked_fill(_diagonal(band, place) + spec.cq - 1 - u.unsqueeze(1) < 0, 0)",
        "",
        "With the mask of the output's row, a NaN in a key that the row does not see makes its scores NaN.",
        (f"{HIDDEN}::test_training",),
    ),
    Mutant(
        "lift-band-subtracted",
        f"{TRITON}/pieces.j2",
        "score[:, None], c)",
        "(c - (c - score[:, None])), c)",
        "A hidden key leaves the rounding errors of its own size in scores of rows that do not see it.",
        (f"{INTERPRETED_HIDDEN}::test_training",),
    ),
    Mutant(
        "lift-band-counted-by-both",
        f"{TRITON}/finish.j2",
        "tl.store(g_entries, tl.zeros([BLOCK, BAND_POW2], g.dtype), mask=inside)",
        "",
        "Gradients of scores on the band reach the lifted operands, too.",
        (f"{INTERPRETED}::test_many_tiles_and_strips",),
    ),
    Mutant(
        "lift-band-multiplies-hidden-scores-by-zero",
        f"{TRITON}/prologue.j2",
        "seen = (row >= 0) & (row < n_q) & counted[None, :]",
        "seen = (row >= 0) & (row < n_q) & (f < REACH)[None, :]",
        "With the mask of the output's row, a NaN in a key that the row does not see makes its scores NaN.",
        (f"{INTERPRETED_HIDDEN}::test_training",),
    ),
    Mutant(
        "lift-band-of-one-edge",
        BAND,
        "last = width - 1 + most if across is None else min(width - 1 + most, across)",
        "last = width - 1 + most",
        "In a narrow window a score counts terms past the other edge.",
        ("tests/test_stencil.py",),
    ),
    Mutant(
        "lift-terms-of-the-first-diagonals",
        f"{TRITON}/prologue.j2",
        "f0 = tl.program_id(0) % n_parts * DIAGONALS",
        "f0 = 0",
        "Where terms are on more diagonals than a program has room for, the others are never written.",
        (f"{INTERPRETED}::test_bands_in_parts",),
    ),
    Mutant(
        "auto-pairs-passes-that-round-differently",
        "mtagen/planner/choice.py",
        'if trains and not rounds_alike(chosen["forward"].plan, chosen["backward"].plan):',
        "if False:",
        "Rows of the probabilities that the backward pass makes do not sum to 1.",
        ("tests/test_choice.py::test_forward_and_backward_round_scores_alike",),
    ),
    Mutant(
        "auto-pairs-by-the-slower-passes",
        "mtagen/planner/choice.py",
        "min(pairs, key=time)",
        "max(pairs, key=time)",
        "Of two pairs of passes that round alike, auto takes the slower one.",
        ("tests/test_choice.py::test_forward_and_backward_round_scores_alike",),
    ),
)
