"""Decode kernels."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED, INTERPRETED_DECODE, TRITON, Mutant

PAGES = "tests/test_emulated_pages.py"

MUTANTS = (
    Mutant(
        "decode-length-beyond-the-cache",
        f"{CUDA}/decode_work.j2",
        "x.seqlens ? min(x.seqlens[b], x.n_max) : x.n_max",
        "x.seqlens ? x.seqlens[b] : x.n_max",
        "A length beyond the cache reads the keys of another sequence.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-few-sequences-in-splits-of-the-longest",
        f"{CUDA}/host.py.j2",
        "if not num_splits and 2 * ctas >= rule[0] else 0",
        "if not num_splits else 0",
        "A few short sequences leave most of the GPU idle.",
        ("tests/test_tile_decode.py::test_splits_of_many_sequences",),
    ),
    Mutant(
        "decode-pages-of-the-item-that-is-awaited",
        f"{CUDA}/decode_loads.cuh",
        "const int next = item + Tile::STAGES - 1;",
        "const int next = item + 1;",
        "In a ring of 3 stages the pages of values are looked up for keys, and keys lie in pages of an earlier tile.",
        (f"{PAGES}::test_steps_of_several_tiles_have_the_bits_of_a_cache",),
    ),
    Mutant(
        "decode-as-many-pages-as-lanes-and-one-more",
        "mtagen/planner/tile/decode.py",
        "tile.keys // size + 1 <= _LANES",
        "tile.keys // size <= _LANES",
        "The last rows of a tile that begins inside a page are read from its first page.",
        (f"{PAGES}::test_steps_of_several_tiles_have_the_bits_of_a_cache",),
    ),
    Mutant(
        "decode-combine-one-split-a-lane",
        f"{CUDA}/combine.j2",
        "for (int split = lane; split < num_splits; split += 32) total +=",
        "if (int split = lane; split < num_splits) total +=",
        "Of more than 32 splits the others are left out of the sum that outputs are divided by.",
        (f"{EMULATED}::test_decode_in_more_splits_than_a_warp_has_lanes",),
    ),
    Mutant(
        "decode-heads-of-a-later-block",
        f"{CUDA}/decode_work.j2",
        "head = kv_head * x.group + block * x.cta_heads,",
        "head = kv_head * x.group + block,",
        "Where a group has more heads than a CTA takes, some are decoded twice and others never.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-first-heads-only",
        "mtagen/planner/tile/decode.py",
        "grid = (BATCH * KV_HEADS * ceiling(GROUP / CTA_HEADS) * SPLITS,)",
        "grid = (BATCH * KV_HEADS * SPLITS,)",
        "Where a group has more heads than a CTA takes, the others' CTAs are not launched.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-tokens-of-a-later-step",
        f"{CUDA}/decode_softmax.cuh",
        "token = index % work.token_tiles * Tile::TOKENS;",
        "token = index % work.token_tiles;",
        "Of more new tokens than one step takes, some are decoded twice and others never.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-first-24-rows-of-scores",
        f"{CUDA}/decode_scores.cuh",
        "for (int row = 0; row < work.rows; row += 24) {",
        "for (int row = 0; row < min(work.rows, 24); row += 24) {",
        "Where a CTA has more than 24 rows of queries, the scores of the others are zeros.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-mask-off-by-one",
        f"{CUDA}/decode_softmax.cuh",
        "!visible(position, j)",
        "!visible(position + 1, j)",
        "A new token sees the one after it.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "triton-decode-length-beyond-the-cache",
        f"{TRITON}/decode.j2",
        "mask=has_seqlens != 0, other=n_max), n_max)",
        "mask=has_seqlens != 0, other=n_max), 2 * n_max)",
        "A length beyond the cache reads the keys of another sequence.",
        (f"{INTERPRETED_DECODE}::test_lengths_beyond_the_cache",),
    ),
    Mutant(
        "triton-decode-splits-not-rescaled",
        f"{TRITON}/decode.j2",
        "acc = acc * rescale + tl.sum(factor",
        "acc = acc + tl.sum(factor",
        "Of more splits than are merged at once, the first ones keep the scale of their own peak.",
        (f"{INTERPRETED_DECODE}::test_more_splits_than_are_merged_at_once",),
    ),
)
