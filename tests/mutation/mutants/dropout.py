"""Dropout."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED, SM90, Mutant

MUTANTS = (
    Mutant(
        "dropout-counts-keys-from-the-window",
        f"{CUDA}/forward_producer.j2",
        "group_of(work.unseen + step * KEYS - LAG)",
        "group_of(step * KEYS - LAG)",
        "What is dropped of a key depends on which keys a CTA skips.",
        (f"{EMULATED}::test_what_is_dropped_is_what_the_mask_says",),
    ),
    Mutant(
        "dropout-of-the-first-column",
        f"{CUDA}/dropout_bits.cuh",
        "signs_of_bytes(word[0], word[1], 0x4400",
        "signs_of_bytes(word[0], word[0], 0x4400",
        "Of two neighbouring keys the second is dropped with the first.",
        (f"{EMULATED}::test_what_is_dropped_is_what_the_mask_says",),
    ),
    Mutant(
        "dropout-by-own-bits-alone",
        f"{CUDA}/dropout.cuh",
        "< lower ? 0x01010101u : 0u",
        "< lower ? 0u : 0u",
        "p is rounded down to a multiple of 1 / 128.",
        (f"{EMULATED}::test_what_is_dropped_is_what_the_mask_says",),
    ),
    Mutant(
        "dropout-in-bits-of-shorter-rows",
        "mtagen/planner/tile/dropout_bits.py",
        "return 4 * (last_first // 32 + -(-part // 32) + 1)",
        "return 4 * (-(-part // 32) + 1)",
        "Threads of a tile's last part read bits beyond their row, and beyond the last one.",
        (f"{EMULATED}::test_dropout",),
    ),
    Mutant(
        "dropout-not-of-gradients",
        f"{CUDA}/backward_scores.j2",
        '"mask.element(dp[4 * n + e], e >> 1, n, e & 1)" if plan.dropout_bits else ',
        "",
        "Scores get gradients through values that were dropped.",
        (f"{EMULATED}::test_dropout",),
    ),
    Mutant(
        "dropout-scale-not-in-lse",
        f"{CUDA}/backward_rows.j2",
        "    row_lse[to] -= log2f(keep_scale);\n",
        "",
        "The backward pass does not divide what is kept by 1 - p.",
        (f"{EMULATED}::test_dropout",),
    ),
    Mutant(
        "dropout-bits-not-read-yet",
        f"{CUDA}/forward_sm90.cu.j2",
        "__syncwarp();",
        "",
        "Bits are drawn over those that a lane still has to read.",
        (f"{EMULATED}::test_no_races[forward-{SM90}-dropout]",),
        within="issue_values",
    ),
    Mutant(
        "dropout-bits-of-two-steps-in-one-place",
        f"{CUDA}/backward_cta.j2",
        "(step & 1) * DROPOUT_TILE",
        "0 * DROPOUT_TILE",
        "The helper draws the next step's bits over those in use.",
        (f"{EMULATED}::test_no_races[backward-{SM90}-dropout]",),
    ),
)
