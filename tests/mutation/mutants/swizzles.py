"""Addresses of swizzled tiles, how threads share their rows and blocks, and tokens that decode repeats."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED, Mutant

SWEEP = "tests/test_sweep.py"

MUTANTS = (
    Mutant(
        "backward-copies-without-the-swizzle",
        f"{CUDA}/backward_tiles.cuh",
        "copy_async(tile_address_from<TILE_ROWS>(to, x, 0),",
        "copy_async(to + x * PANEL_ROW,",
        "Where threads copy fewer than 8 rows at a time, rows 4 to 7 of each 8 lie in each other's columns.",
        (f"{SWEEP}::test_backward_that_copies_half_a_period_of_the_swizzle",),
    ),
    Mutant(
        "forward-copies-without-the-swizzle",
        f"{CUDA}/swizzle.cuh",
        "copy_async(tile_address_from<ROWS>(to, x, 0),",
        "copy_async(to + x * PANEL_ROW,",
        "The same in the forward pass, of keys and values.",
        (f"{SWEEP}::test_sample[forward]",),
    ),
    Mutant(
        "backward-lanes-of-a-row-no-power-of-two",
        "mtagen/planner/tile/backward_geometry.py",
        "return 1 << (dim // 8 - 1).bit_length()",
        "return dim // 8",
        "Threads step by a number of rows that is no power of two, which swizzled addresses cannot follow.",
        (f"{SWEEP}::test_blocks_and_rows_lie_powers_of_two_apart",),
    ),
    Mutant(
        "backward-blocks-that-do-not-divide",
        "mtagen/planner/tile/backward_geometry.py",
        "if blocks % n == self.warps % n == 0]",
        "if self.warps % n == 0]",
        "Where warps cannot share the blocks of a head dim evenly, the last columns of dK and dV are never made.",
        (f"{SWEEP}::test_blocks_and_rows_lie_powers_of_two_apart",),
    ),
    Mutant(
        "decode-masks-a-repeated-token-as-the-next",
        f"{CUDA}/decode_convolution.cuh",
        "first + token_of_row(work, token, m);",
        "first + token + m / CHUNKS;",
        "Rows past the last token have its scores under the mask of a later one, and overwrite its probabilities.",
        (f"{EMULATED}::test_decode_of_terms_that_each_token_sees",),
    ),
)
