"""Backward kernels on tiles."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED, INTERPRETED, SM80, SM90, TRITON, Mutant

MUTANTS = (
    Mutant(
        "backward-sign-of-the-gradient-of-lse",
        f"{CUDA}/backward_rows.j2",
        "dot - grad_lse[row.statistic]",
        "dot + grad_lse[row.statistic]",
        "Gradients through the log-sum-exp have the wrong sign.",
        (f"{EMULATED}::test_gradient_through_the_log_sum_exp",),
    ),
    Mutant(
        "backward-sm90-scores-overwritten-while-read",
        f"{CUDA}/backward_sm90.cu.j2",
        "barrier_wait(above_read, ~done & 1);",
        "",
        "Where the slab has no room for the row tiles, the next step's scores replace those that the gradient of W is "
        "still being made of.",
        (f"{EMULATED}::test_no_races[backward-sm_90a-11x11-d80-bf16-right-causal-source]",),
    ),
    Mutant(
        "backward-sm90-vectors-overwritten-while-used",
        f"{CUDA}/backward_sm90.cu.j2",
        "barrier_wait(used, ~done & 1);",
        "",
        "The next step's vectors are copied over those that the main warps are still multiplying.",
        (f"{EMULATED}::test_no_races[backward-sm_90a-6x11-d64-bf16-both-causal-source]",),
    ),
    Mutant(
        "backward-sm90-used-before-keys-are-made",
        f"{CUDA}/backward_sm90.cu.j2",
        """      wgmma_wait<0>();
      pin(dv_sums);
      pin(dk_sums);
      barrier_arrive(used);
""",
        """      barrier_arrive(used);
      wgmma_wait<0>();
      pin(dv_sums);
      pin(dk_sums);
""",
        "The main warps give their vectors away while the products for dV and dK still read them.",
        (f"{EMULATED}::test_no_races[backward-sm_90a-6x11-d64-bf16-both-causal-source]",),
    ),
    Mutant(
        "backward-sm90-bits-promised-before-they-are-drawn",
        f"{CUDA}/backward_sm90.cu.j2",
        "        cta.draw<WARPGROUP>(seed, threshold, heads, h, step + 1, thread_of_warpgroup());\n",
        "        barrier_arrive(loaded);\n"
        "        cta.draw<WARPGROUP>(seed, threshold, heads, h, step + 1, thread_of_warpgroup());\n",
        "The main warps may read what dropout keeps before the helper has drawn it.",
        (f"{EMULATED}::test_no_races[backward-sm_90a-6x11-d64-bf16-both-causal-source-dropout]",),
    ),
    Mutant(
        "backward-sm90-columns-of-queries-missing",
        f"{CUDA}/backward_sm90.cu.j2",
        "warpgroup < DQ_PARTS)",
        "warpgroup < 1)",
        "Half of the columns of dQ are not made where two of three warpgroups make them.",
        (f"{EMULATED}::test_accurate[sm_90a-6x11-d64-bf16-both-causal-source]",),
    ),
    Mutant(
        "backward-sm90-columns-of-queries-added-by-all",
        f"{CUDA}/backward_wgmma.cuh",
        " || at.part >= DQ_PARTS",
        "",
        "Warpgroups that make no columns of dQ add what their registers hold.",
        (f"{EMULATED}::test_accurate[sm_90a-6x11-d64-bf16-both-causal-source]",),
    ),
    Mutant(
        "backward-sm90-widened-by-too-few-columns",
        "mtagen/planner/tile/backward_geometry.py",
        "return 9 if self.pads_weight",
        "return 7 if self.pads_weight",
        "Kernels of 8 and 9 columns lose their last taps.",
        ("tests/test_tile_backward.py::test_widened_weights_save_the_helper_a_chunk",),
    ),
    Mutant(
        "backward-sm90-more-row-tiles-than-memory",
        "mtagen/planner/tile/backward_shared.py",
        "if shared.size <= room:",
        "if shared.size > room:",
        "The slab has the row tiles that there is no room for.",
        ("tests/test_tile_backward.py::test_plans_fit_the_chip",),
    ),
    Mutant(
        "backward-sm90-too-few-row-tiles-read-early",
        "mtagen/planner/tile/backward_shared.py",
        "-(-missing * self.geometry.weight_gradient.sets // self.geometry.row_tiles)",
        "-(-(missing - 1) * self.geometry.weight_gradient.sets // self.geometry.row_tiles)",
        "The next step's scores replace those that the gradient of W is still being made of.",
        ("tests/test_tile_backward.py::test_row_tiles_whose_place_is_taken_are_read_early",),
    ),
    Mutant(
        "backward-sm90-scores-converted-before-the-convolution-reads-them",
        f"{CUDA}/backward_sm90.cu.j2",
        "convert_scores(base, first_row_tile, thread_of_warpgroup());",
        "convert_scores(base, first_row_tile + 1, thread_of_warpgroup());",
        "The next step's convolution takes a row tile of bf16 for fp16, and the gradient of W one of fp16 for bf16.",
        (f"{EMULATED}::test_accurate[{SM90}]",),
    ),
    Mutant(
        "backward-sm90-scores-read-while-they-are-converted",
        f"{CUDA}/backward_sm90.cu.j2",
        """        named_barrier(PRODUCER, WARPGROUP);
{% endif %}
""",
        "{% endif %}\n",
        "Warps of the helper load scores that other warps of it have not converted yet.",
        (f"{EMULATED}::test_no_races[backward-{SM90}]",),
    ),
    Mutant(
        "backward-sm90-operands-of-other-row-shifts",
        f"{CUDA}/weight_loaded.cuh",
        "return 2 * (shift & 1) + (shift >> 1);",
        "return shift;",
        "The second of three row shifts gets the gradient of W from the scores of another.",
        (f"{EMULATED}::test_accurate[{SM90}]",),
    ),
    Mutant(
        "backward-sm90-outputs-in-odd-rows-see-too-little",
        f"{CUDA}/weight_loaded.cuh",
        "CHUNK * (FIRST_WINDOW + from) - row);",
        "CHUNK * (FIRST_WINDOW + from));",
        "Of the key of its own position, an output in an odd row gives the gradient of W nothing.",
        (f"{EMULATED}::test_accurate[sm_90a-6x11-d128-bf16-both-causal-output]",),
    ),
    Mutant(
        "backward-keys-of-one-neighbour",
        f"{CUDA}/backward_rows.j2",
        "if (first && keys.block > 0) {",
        "if (first && keys.block > 1) {",
        "Of the keys between the first two CTAs, dK lacks what the first one makes.",
        (f"{EMULATED}::test_accurate[{SM80}]",),
    ),
    Mutant(
        "backward-last-keys-of-every-cta",
        f"{CUDA}/backward_rows.j2",
        " || !first && (keys.block + 1) * OWNED < keys.n_k) return;",
        ") return;",
        "Keys between two CTAs get the first one's part of dK, or the sum, whichever is written last.",
        (f"{EMULATED}::test_the_order_of_warps_changes_nothing[sm_80-backward]",),
    ),
    Mutant(
        "backward-gradient-of-w-of-one-batch-entry",
        f"{CUDA}/weight_gradient.cuh",
        "* batch + b;",
        "* batch;",
        "Batch entries overwrite each other's share of the gradient of W.",
        (f"{EMULATED}::test_accurate[{SM80}]",),
    ),
    Mutant(
        "triton-backward-sign-of-the-gradient-of-lse",
        f"{TRITON}/backward.j2",
        "tl.sum(product, 1) - grad_lse",
        "tl.sum(product, 1) + grad_lse",
        "Gradients through the log-sum-exp have the wrong sign.",
        (f"{INTERPRETED}::test_gradient_through_the_log_sum_exp",),
    ),
    Mutant(
        "triton-contraction-head-of-the-first-chunk",
        f"{TRITON}/contract.j2",
        "h = (head0 + slot) % n_heads",
        "h = slot % n_heads",
        "Where the workspace holds fewer heads than there are, later ones are contracted with other heads' operands.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-contraction-batch-entry-of-the-first-chunk",
        f"{TRITON}/contract.j2",
        "b = (head0 + slot) // n_heads",
        "b = slot // n_heads",
        "Where the workspace holds fewer heads than there are, later ones take operands of the first batch entry.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-lift-batch-entry-of-the-first-chunk",
        f"{TRITON}/prologue.j2",
        "b = (head0 + slot) // n_heads",
        "b = slot // n_heads",
        "Where the workspace holds fewer heads than there are, later ones are lifted from the first batch entry.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-band-of-the-first-chunk",
        f"{TRITON}/finish.j2",
        'band_g = band_g_ptr + ({{ queries.begin("(head0 + slot)") }} + row)',
        'band_g = band_g_ptr + ({{ queries.begin("slot") }} + row)',
        "Where the workspace holds fewer heads than there are, all write the band of the first ones.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-band-of-w-by-the-heads-of-one-entry",
        f"{TRITON}/finish.j2",
        "(index * all_heads + head) * {{ weights }}\n    terms_grad",
        "(index * n_heads + head) * {{ weights }}\n    terms_grad",
        "With more than one batch entry, blocks overwrite each other's share of W's gradient next to the diagonal.",
        (f"{INTERPRETED}::test_bands_in_parts",),
    ),
    Mutant(
        "triton-gradient-of-keys-of-the-first-chunk",
        f"{TRITON}/finish.j2",
        "_vector(head0 // group + kv_slot, n_heads // group",
        "_vector(kv_slot, n_heads // group",
        "Where the workspace holds fewer heads than there are, all gradients of keys go to the first ones.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-rows-of-dq-finished-too-early",
        "mtagen/codegen/layout.py",
        'f"max(begin - {lag}, 0), end if end == n_q else end - {lag}" if lag else "begin, end"',
        '"begin, end"',
        "The last rows of a strip lack what the first rows of the next one add to their gradient.",
        (f"{INTERPRETED}::test_many_tiles_and_strips",),
    ),
    Mutant(
        "triton-rows-of-g-not-carried",
        f"{TRITON}/host.j2",
        "                g[:, :{{ kept }}] = g[:, strip : strip + {{ kept }}]\n",
        "                pass\n",
        "The first rows of a strip take the last of the one before from memory that holds something else.",
        (f"{INTERPRETED}::test_many_tiles_and_strips",),
    ),
    Mutant(
        "triton-tile-a-row-too-many",
        f"{TRITON}/tiles.j2",
        "(i < rows)",
        "(i <= rows)",
        "Without TMA, what follows the last key counts as one more.",
        (f"{INTERPRETED}::test_tiles_by_pointer_and_by_descriptor",),
    ),
    Mutant(
        "triton-tile-as-wide-as-its-block",
        f"{TRITON}/tiles.j2",
        "tl.cdiv(width, VECTOR) * VECTOR",
        "COLUMNS",
        "Without TMA, vectors of a length that is no power of 2 go on with those that follow them.",
        (f"{INTERPRETED}::test_tiles_by_pointer_and_by_descriptor",),
    ),
)
