"""Heads mixed on the chip."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED_HEADS, Mutant

MUTANTS = (
    Mutant(
        "heads-references-of-other-rows",
        f"{CUDA}/heads_statistics.cu.j2",
        "if (!__any_sync(~0u, top > LIMIT)) continue;",
        "",
        "A row gets a new reference because of another row, whose keys are hidden from it.",
        (f"{EMULATED_HEADS}::test_hidden_numbers[before and after]",),
    ),
    Mutant(
        "heads-references-by-all-lanes",
        f"{CUDA}/heads.cuh",
        "if (lane >= 4) return;",
        "",
        "Eight lanes store the same numbers at the same place.",
        (f"{EMULATED_HEADS}::test_no_races[before and after]",),
    ),
    Mutant(
        "heads-sums-without-factor",
        f"{CUDA}/heads_statistics.cu.j2",
        "total[g + i][n] *= factor[n]",
        "total[g + i][n] *= 1.f",
        "Earlier tiles keep the old reference when a row gets a new one.",
        (f"{EMULATED_HEADS}::test_scores_far_apart[30.0-before and after]",),
    ),
    Mutant(
        "heads-chunks-of-whole-quotients",
        f"{CUDA}/heads_pieces.j2",
        "all * (chunk + 1) / chunks - skipped",
        "all / chunks",
        "Where chunks do not divide the tiles, the last tiles are in no chunk.",
        (f"{EMULATED_HEADS}::test_scores_far_apart[30.0-before and after]",),
    ),
    Mutant(
        "heads-parts-of-one-place",
        f"{CUDA}/heads_outputs.cu.j2",
        "partial_out + block.chunk * results(block, n_heads) * DV + at",
        "partial_out + at",
        "All chunks of keys write their parts of outputs to the same place.",
        (f"{EMULATED_HEADS}::test_scores_far_apart[30.0-before and after]",),
    ),
    Mutant(
        "heads-chunks-of-all-keys",
        f"{CUDA}/heads_pieces.j2",
        "return {seen.start + skipped * KEYS,",
        "return {skipped * KEYS,",
        "Chunks are counted from the first key, not from the first that the block sees.",
        (f"{EMULATED_HEADS}::test_chunks_of_a_window",),
    ),
    Mutant(
        "heads-shared-tile-before-it-is-read",
        f"{CUDA}/heads_outputs.cu.j2",
        "barrier_wait(empty + barrier + BARRIER, (t / STAGES & 1) ^ 1);",
        "",
        "A tile of two head warps is overwritten when the first of them has read it.",
        (f"{EMULATED_HEADS}::test_heads_share_tiles[before and after-16-4]",),
    ),
    Mutant(
        "heads-tiles-of-odd-groups",
        f"{CUDA}/heads_pieces.j2",
        "return !((group | first_head) & 1);",
        "return group > 1;",
        "The two heads of a head warp take one tile although they have different keys.",
        (f"{EMULATED_HEADS}::test_heads_share_tiles[12 heads before, 6 after, wide values-24-8]",),
    ),
    Mutant(
        "heads-scores-before-rows-are-read",
        f"{CUDA}/heads_statistics.cu.j2",
        "barrier_wait(barriers + READ + BARRIER * stage, parity ^ 1);",
        "",
        "Scores of a tile overwrite those of a tile that rows still read.",
        (f"{EMULATED_HEADS}::test_no_races[before and after]",),
    ),
    Mutant(
        "heads-values-before-they-are-read",
        f"{CUDA}/heads_outputs.cu.j2",
        "barrier_wait(empty + barrier, (t / STAGES & 1) ^ 1);",
        "",
        "Keys and values of a tile overwrite those that are still multiplied.",
        (f"{EMULATED_HEADS}::test_no_races[before and after]",),
    ),
    Mutant(
        "heads-hidden-keys-have-probabilities",
        f"{CUDA}/heads_outputs.cu.j2",
        "hidden(i, e) ? 0.f : p",
        "p",
        "Keys that a row does not see count in its outputs.",
        (f"{EMULATED_HEADS}::test_accurate[a window]",),
    ),
    Mutant(
        "heads-scale-of-fp16",
        "mtagen/planner/heads/kernels.py",
        'return 1 / PROBABILITY_SCALE if self.spec.dtype == "fp16" and self.stages.post_mix else 1.0',
        "return 1.0",
        "Mixed probabilities keep their scale in fp16, whose range large matrices then exceed.",
        ("tests/test_heads.py::test_scale_of_probabilities",),
    ),
)
