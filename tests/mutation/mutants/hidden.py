"""What the mask hides shows in results that do not depend on it."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED, SM80, SM90, TRITON, Mutant

TEST = "tests/test_hidden_emulated.py"
STRIPS = "tests/interpreter/test_hidden_cuda_strip.py"

MUTANTS = (
    Mutant(
        "softmax-reference-of-the-whole-warp",
        f"{CUDA}/softmax.cuh",
        "exceeds[r] ? fminf(shift[r], -maximum * exponent - HEADROOM) : shift[r]",
        "fminf(shift[r], -maximum * exponent - HEADROOM)",
        "A row takes another reference because a row below it sees a large score.",
        (f"{TEST}::test_training[{SM90}]",),
    ),
    Mutant(
        "softmax-sum-of-other-rows-lost",
        f"{CUDA}/softmax.cuh",
        "sum[r] = most > LIMIT ? -fabsf(sum[r]) : sum[r] + added[r];",
        "sum[r] = most > LIMIT ? -fabsf(sum[r]) : sum[r], added[r] = most;",
        "Where a row below sees a large score, a row loses its sum of the tile.",
        (f"{TEST}::test_training[{SM80}]",),
    ),
    Mutant(
        "softmax-limit-of-one-thread",
        f"{CUDA}/softmax.cuh",
        "most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));",
        "",
        "Of the four threads of a row, two take another reference.",
        (f"{EMULATED}::test_scores_that_grow_along_the_keys",),
    ),
    Mutant(
        "softmax-limit-beyond-fp16",
        f"{CUDA}/forward_geometry.j2",
        "LIMIT = {{ 2.0 ** plan.references.below }}f",
        "LIMIT = 1e10f",
        "Probabilities relative to an early maximum overflow fp16.",
        (f"{EMULATED}::test_scores_that_grow_along_the_keys",),
    ),
    Mutant(
        "softmax-first-tile-without-references",
        f"{CUDA}/softmax.cuh",
        "sum[2] = {-0.f, -0.f};",
        "sum[2] = {0.f, 0.f};",
        "Rows of the first tile keep the reference that stands for none.",
        (f"{EMULATED}::test_accurate[{SM90}]",),
    ),
    Mutant(
        "decode-keys-past-those-in-use",
        f"{CUDA}/decode_loads.cuh",
        "work.first_key(item / 2), 0, work.length)",
        "work.first_key(item / 2), 0, x.n_max)",
        "The scores of keys past the length of a sequence are convolved.",
        (f"{TEST}::test_decode",),
    ),
    Mutant(
        "row-softmax-backward-hidden-gradients",
        f"{CUDA}/row_softmax_backward.cu.j2",
        "if (edge && seen.lacks(j)) dp[e] = 0.f;",
        "",
        "A row whose numbers overflow makes NaN of the gradients of keys that it does not see.",
        (f"{STRIPS}::test_training[pairs in a window on both sides]",),
    ),
    Mutant(
        "strip-softmax-backward-hidden-gradients",
        f"{TRITON}/strip_rows_backward.j2",
        "dc = p * tl.where(p != 0.0, dp, 0.0)",
        "dc = p * dp",
        "A row of mixed heads whose numbers overflow makes NaN of the gradients of keys that it does not see.",
        ("tests/interpreter/test_hidden.py::test_training_with_planes_that_overflow",),
    ),
    Mutant(
        "gathered-columns-of-the-row-below",
        f"{CUDA}/toeplitz.j2",
        "a[2] = third == 8 ? two[1] : two[0]",
        "a[2] = two[1]",
        "Kernels of an odd number of rows multiply the row below by a weight of 0, and NaN in its scores is NaN here.",
        (f"{TEST}::test_keys_that_meet_weights_of_zero",),
    ),
)
