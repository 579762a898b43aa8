"""The mutants: bugs of one line, each of which some test must see.

A new kernel, pass or rule comes with the mistakes that are easily made in it. To change a file that a mutant is in may
mean to change the mutant: ``tests/test_mutation.py`` says if its text is no longer there.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: what it is called on the command line.
        file: where it is, below the repository's root.
        old: text that occurs exactly once in the file.
        new: what stands there instead.
        harm: what goes wrong, in a sentence.
        killed_by: tests of which one must fail, as pytest takes them: files or tests below the repository's root.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    killed_by: tuple[str, ...]


CUDA, TRITON = "mtagen/templates/cuda", "mtagen/templates/triton"
EMULATED, INTERPRETED = "tests/test_emulated_kernels.py", "tests/interpreter/test_kernels.py"
INTERPRETED_DECODE = "tests/interpreter/test_decode.py"
SM90, SM80 = "sm_90a-6x11-d64-bf16-both-causal-source", "sm_80-6x11-d64-fp16-both-causal-source"

FORWARD = (
    Mutant(
        "softmax-sum-not-rescaled",
        f"{CUDA}/softmax.cuh",
        "sum[r] *= rescale[r];",
        "",
        "When a later tile of keys exceeds the reference, what was summed before keeps the old one's scale.",
        (f"{EMULATED}::test_scores_that_grow_along_the_keys",),
    ),
    Mutant(
        "softmax-maximum-of-two-threads",
        f"{CUDA}/softmax.cuh",
        "maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));",
        "",
        "The four threads of a row take two references, whose sums do not add up.",
        (f"{EMULATED}::test_accurate[{SM90}]",),
    ),
    Mutant(
        "softmax-limit-of-even-rows",
        f"{CUDA}/softmax.cuh",
        "fmaxf(added[0], added[1]) > LIMIT",
        "added[0] > LIMIT",
        "Odd rows whose scores grow keep their reference until their probabilities overflow fp16.",
        (f"{EMULATED}::test_scores_that_grow_along_the_keys",),
    ),
    Mutant(
        "forward-sm90-odd-rows-rescaled-as-even-ones",
        f"{CUDA}/forward_sm90.cu.j2",
        "o[i] *= rescale[i >> 1 & 1]",
        "o[i] *= rescale[0]",
        "Outputs of odd rows are rescaled by the factor of the even row above.",
        (f"{EMULATED}::test_scores_that_grow_along_the_keys",),
    ),
    Mutant(
        "forward-sm80-odd-rows-rescaled-as-even-ones",
        f"{CUDA}/forward_sm80.cu.j2",
        "o[m][i] *= rescale[i >> 1 & 1]",
        "o[m][i] *= rescale[0]",
        "Outputs of odd rows are rescaled by the factor of the even row above.",
        (f"{EMULATED}::test_scores_that_grow_along_the_keys",),
    ),
    Mutant(
        "forward-negative-number-of-steps",
        f"{CUDA}/forward_rows.j2",
        "max(0, (key_end + LAG + KEYS - 1) / KEYS)",
        "(key_end + LAG + KEYS - 1) / KEYS",
        "Where there are far more queries than keys nothing is loaded, and the warps that compute wait for ever.",
        (f"{EMULATED}::test_far_more_queries_than_keys",),
    ),
    Mutant(
        "softmax-exponent-without-a-floor",
        f"{CUDA}/softmax.cuh",
        "fmaxf(fabsf(scale) * (LOG2_E / score_scale), 1e-20f)",
        "fabsf(scale) * (LOG2_E / score_scale)",
        "With a scale of 0, masked scores become 0 * -inf, which is NaN.",
        (f"{EMULATED}::test_any_scale",),
    ),
    Mutant(
        "forward-sign-of-the-scale",
        f"{CUDA}/slab.j2",
        "copysignf(1.f, scale) * __ldg",
        "__ldg",
        "A negative scale counts as a positive one.",
        (f"{EMULATED}::test_any_scale",),
    ),
    Mutant(
        "forward-sign-of-the-scale-of-one-tap",
        f"{CUDA}/no_slab.j2",
        "copysignf(1.f, scale) * __ldg",
        "__ldg",
        "A negative scale counts as a positive one, where the kernel has a single tap.",
        (f"{EMULATED}::test_any_scale",),
    ),
    Mutant(
        "forward-mask-of-the-last-row-only",
        f"{CUDA}/forward_masks.j2",
        'hidden(("position", "position + 15"),',
        'hidden(("position + 15", "position + 15"),',
        "Of tiles that the diagonal only just reaches, keys are seen that are hidden from the first rows.",
        (f"{EMULATED}::test_accurate[{SM90}]",),
    ),
    Mutant(
        "forward-sm90-strip-written-without-a-barrier",
        f"{CUDA}/forward_sm90.cu.j2",
        "    __syncwarp();\n    if (gives_rows)",
        "    if (gives_rows)",
        "Lanes may read scores of their warp's rows before other lanes have written them.",
        (f"{EMULATED}::test_no_races[forward-{SM90}]",),
    ),
    Mutant(
        "score-exponent-too-small",
        "mtagen/planner/tile/toeplitz.py",
        "SCORE_EXPONENT = 8",
        "SCORE_EXPONENT = 2",
        "Products of queries and keys that README says are supported overflow fp16.",
        (f"{EMULATED}::test_products_as_large_as_is_supported",),
    ),
    Mutant(
        "triton-forward-last-wave-of-heads",
        f"{TRITON}/forward.j2",
        "slot = wave * HEADS + index % heads",
        "slot = wave * heads + index % heads",
        "Where the last wave has fewer heads than the others, it computes the first ones again, and its own never.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-forward-correction-of-another-head",
        f"{TRITON}/prologue.j2",
        "counted = (row >= 0) & (row < n_q)",
        "counted = (row < n_q)",
        "The first rows' correction counts rows before the first, which are the last ones of the head before.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
)

BACKWARD = (
    Mutant(
        "backward-sign-of-the-gradient-of-lse",
        f"{CUDA}/backward_rows.j2",
        "dot - grad_lse[row]",
        "dot + grad_lse[row]",
        "Gradients through the log-sum-exp have the wrong sign.",
        (f"{EMULATED}::test_gradient_through_the_log_sum_exp",),
    ),
    Mutant(
        "backward-sm90-scores-overwritten-while-read",
        f"{CUDA}/backward_sm90.cu.j2",
        "barrier_wait(above_taken, ~done & 1);",
        "",
        "The next tile's scores replace those that the gradient of W is still being made of.",
        (f"{EMULATED}::test_no_races[backward-{SM90}]",),
    ),
    Mutant(
        "backward-gradient-of-w-of-one-batch-entry",
        f"{CUDA}/backward_weight.cuh",
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
        "((head0 + slot) * n_q + row) * BAND",
        "(slot * n_q + row) * BAND",
        "Where the workspace holds fewer heads than there are, all write the band of the first ones.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-band-of-w-by-the-heads-of-one-entry",
        f"{TRITON}/finish.j2",
        "\n    partial = partial_ptr + (block * all_heads + head) *",
        "\n    partial = partial_ptr + (block * n_heads + head) *",
        "With more than one batch entry, blocks overwrite each other's share of W's gradient next to the diagonal.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-gradient-of-keys-of-the-first-chunk",
        f"{TRITON}/finish.j2",
        "row0 = (head0 // group + kv_slot) * n_x",
        "row0 = kv_slot * n_x",
        "Where the workspace holds fewer heads than there are, all gradients of keys go to the first ones.",
        (f"{INTERPRETED}::test_chunks_of_heads",),
    ),
    Mutant(
        "triton-rows-of-dq-finished-too-early",
        f"{TRITON}/host.j2",
        "first, last = max(begin - {{ kept }}, 0), end if end == n_q else end - {{ kept }}",
        "first, last = begin, end",
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
)

DECODE = (
    Mutant(
        "decode-length-beyond-the-cache",
        f"{CUDA}/decode.cu.j2",
        "x.seqlens ? min(x.seqlens[b], x.n_max) : x.n_max",
        "x.seqlens ? x.seqlens[b] : x.n_max",
        "A length beyond the cache reads the keys of another sequence.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-combine-one-split-a-lane",
        f"{CUDA}/decode.cu.j2",
        "for (int split = lane; split < num_splits; split += 32) total +=",
        "if (int split = lane; split < num_splits) total +=",
        "Of more than 32 splits the others are left out of the sum that outputs are divided by.",
        (f"{EMULATED}::test_decode_in_more_splits_than_a_warp_has_lanes",),
    ),
    Mutant(
        "decode-heads-of-a-later-block",
        f"{CUDA}/decode.cu.j2",
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
        f"{CUDA}/decode.cu.j2",
        "token = index % share.token_tiles * Tile::TOKENS;",
        "token = index % share.token_tiles;",
        "Of more new tokens than one step takes, some are decoded twice and others never.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-first-24-rows-of-scores",
        f"{CUDA}/decode.cu.j2",
        "for (int row = 0; row < share.rows; row += 24) {",
        "for (int row = 0; row < min(share.rows, 24); row += 24) {",
        "Where a CTA has more than 24 rows of queries, the scores of the others are zeros.",
        (f"{EMULATED}::test_decode",),
    ),
    Mutant(
        "decode-mask-off-by-one",
        f"{CUDA}/decode.cu.j2",
        'hidden("position", "j", n_k=none) if mask.hides',
        'hidden("position + 1", "j", n_k=none) if mask.hides',
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
        "acc = acc * rescale + tl.sum(share",
        "acc = acc + tl.sum(share",
        "Of more splits than are merged at once, the first ones keep the scale of their own peak.",
        (f"{INTERPRETED_DECODE}::test_more_splits_than_are_merged_at_once",),
    ),
)

HOST = (
    Mutant(
        "gradient-of-out-passed-on-as-it-is",
        "mtagen/ops/executor.py",
        "grad_out if _is_aligned(grad_out) else grad_out.clone(memory_format=torch.contiguous_format)",
        "grad_out",
        "The gradient of a sum, which is one number with strides of 0, reaches kernels that cannot read it.",
        ("tests/test_executor.py",),
    ),
    Mutant(
        "gradient-of-w-left-in-fp32",
        "mtagen/ops/executor.py",
        "*(dx.to(x.dtype) for dx, x in zip(dweights, weights, strict=False))",
        "*dweights[: len(weights)]",
        "The gradient of a bf16 weight is fp32.",
        ("tests/test_executor.py",),
    ),
    Mutant(
        "decode-launched-on-an-empty-cache",
        "mtagen/ops/executor.py",
        "if q_tail.numel() == 0 or k_cache.numel() == 0:",
        "if q_tail.numel() == 0:",
        "Kernels are launched with nothing to read.",
        ("tests/test_executor.py",),
    ),
    Mutant(
        "expanded-rows-count-as-aligned",
        "mtagen/ops/executor.py",
        "and (n <= 1 or (stride_n > 0 and stride_n % vector == 0))",
        "and (n <= 1 or stride_n % vector == 0)",
        "One row that stands for all, with a stride of 0, reaches kernels that cannot read it.",
        ("tests/test_executor.py",),
    ),
    Mutant(
        "lengths-with-strides",
        "mtagen/ops/executor.py",
        "cache_seqlens.contiguous()",
        "cache_seqlens",
        "Lengths that are a column of a table are read as if they lay side by side.",
        ("tests/test_executor.py",),
    ),
    Mutant(
        "weight-not-dense",
        "mtagen/ops/executor.py",
        "if weight.dtype != torch.float32 or not weight.is_contiguous():",
        "if weight.dtype != torch.float32:",
        "A weight that is part of another tensor is read as if it lay alone.",
        ("tests/test_executor.py",),
    ),
    Mutant(
        "key-without-sources",
        "mtagen/runtime/load.py",
        "cache_key(sources.digest, plan.to_dict(),",
        "cache_key(plan.to_dict(),",
        "A template that changes leaves yesterday's kernel in the cache.",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "digest-without-texts",
        "mtagen/codegen/__init__.py",
        "for part in (name, text):",
        "for part in (name,):",
        "A template that changes leaves yesterday's kernel in the cache.",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "key-without-torch",
        "mtagen/runtime/load.py",
        "plan.to_dict(), torch.__version__, ",
        "plan.to_dict(), ",
        "Another version of torch gets kernels that were made with this one.",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "key-without-triton",
        "mtagen/runtime/load.py",
        ', triton_version() if plan.served_by("triton") else None)',
        ")",
        "Another version of triton gets kernels that were made with this one.",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "key-without-options",
        "mtagen/runtime/nvrtc.py",
        "cache_key(source, arch, _OPTIONS, ",
        "cache_key(source, arch, ",
        "Kernels that were compiled with other options are taken from the cache.",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "tuned-for-another-value-head-dim",
        "mtagen/runtime/tuned.py",
        'cache_key("tuned", spec.to_dict(), describe_machine())',
        'cache_key("tuned", spec.to_dict() | {"value_head_dim": spec.head_dim}, describe_machine())',
        "What was tuned for one value_head_dim is followed for another.",
        ("tests/test_tuning.py",),
    ),
    Mutant(
        "variants-of-another-value-head-dim",
        "mtagen/planner/tile/passes.py",
        "d{spec.head_dim} dv{spec.value_head_dim}",
        "d{spec.head_dim} dv{spec.head_dim}",
        "A CUDA kernel that was measured with one value_head_dim is taken for another.",
        ("tests/test_tables.py",),
    ),
    Mutant(
        "tiles-of-another-value-head-dim",
        "mtagen/planner/lift/tiling.py",
        "d{d} dv{dv} terms{lift.terms}",
        "d{d} dv{d} terms{lift.terms}",
        "A Triton tile that was measured with one value_head_dim is taken for another.",
        ("tests/test_tables.py",),
    ),
)

PLANNER = (
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
        "return sorted([self, *made], key=lambda one: one.decision_cost(key))",
        "return made",
        "Tuning loses the tile that is planned if the register model refuses it.",
        ("tests/test_plan.py",),
    ),
)

SOURCES = (
    Mutant(
        "digest-without-names",
        "mtagen/codegen/__init__.py",
        "for part in (name, text):",
        "for part in (text,):",
        "Plans whose kernels have other names share an entry of the cache.",
        ("tests/test_generated.py::test_every_part_of_the_sources_is_in_their_digest",),
    ),
    Mutant(
        "thread-without-context",
        "mtagen/templates/host/launcher.py",
        "driver.cuCtxSetCurrent(self._context)",
        "pass",
        "Launches from a thread that never used the device fail.",
        ("tests/test_cuda_runtime.py::test_a_thread_that_never_used_the_device_gets_its_context",),
    ),
    Mutant(
        "strides-of-32-bits",
        "mtagen/codegen/host.py",
        '"long long": "q"',
        '"long long": "i"',
        "Arguments after a stride are read from the wrong place.",
        ("tests/test_cuda_runtime.py::test_types_of_arguments",),
    ),
    Mutant(
        "decode-takes-the-largest-kernel",
        "mtagen/templates/cuda/host.py.j2",
        "if cta_heads == group:",
        "if cta_heads > group:",
        "One token of one head is decoded by the kernel for many heads.",
        ("tests/test_tile_decode.py::test_a_group_takes_the_smallest_kernel_that_holds_it",),
    ),
)

PIPELINE = "mtagen/cpu/pipeline.py"
STAGES = (
    Mutant(
        "strip-without-context",
        PIPELINE,
        "first = max(0, begin - spec.context)",
        "first = begin",
        "The first rows of a strip lack the queries that their convolutions read.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "strip-of-all-rows",
        PIPELINE,
        "size = max(1, STRIP_SCORES // (heads * nk), 2 * spec.context)",
        "size = max(1, nq)",
        "Memory grows with the square of the length.",
        ("tests/test_pipeline.py::test_no_tensor_grows_with_the_square_of_the_length",),
    ),
    Mutant(
        "strip-without-its-own-keys",
        PIPELINE,
        "max(0, end + nk - nq)",
        "max(0, begin + nk - nq)",
        "The rows of a strip do not see the keys beside them.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "pipeline-lse-not-differentiated",
        PIPELINE,
        "+ dlse.unsqueeze(-1))",
        ")",
        "The gradient of the log-sum-exp is dropped.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "pipeline-row-sum-of-dp",
        PIPELINE,
        "(p * dp).sum(-1, keepdim=True)",
        "dp.sum(-1, keepdim=True)",
        "The gradient through the softmax is wrong.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "mixture-not-transposed",
        PIPELINE,
        "(weight.mT @ gradient)",
        "(weight @ gradient)",
        "The gradient of what is mixed goes to other heads.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "gradient-of-matrices-transposed",
        PIPELINE,
        "dy_part @ x_part.mT",
        "x_part @ dy_part.mT",
        "The gradient of the matrices has its heads exchanged.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "gradient-of-hidden-probabilities",
        PIPELINE,
        "unmixed, dshares).masked_fill(forbidden, 0)",
        "unmixed, dshares)",
        "Probabilities that the mask removes after their convolution have a gradient.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "gradient-of-hidden-scores",
        PIPELINE,
        'return dx.masked_fill(forbidden, 0) if self.spec.mask == "source" else dx',
        "return dx",
        "Scores that the mask removes before their convolution have a gradient.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "gradient-of-kernels-of-the-last-strip",
        PIPELINE,
        "self.gradients[name][:, :, term.columns] +=",
        "self.gradients[name][:, :, term.columns] =",
        "Only one strip counts for the gradient of a kernel.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "pipeline-blind-rows",
        PIPELINE,
        "logits.softmax(-1).masked_fill(logits == -torch.inf, 0)",
        "logits.softmax(-1)",
        "Rows that see no key are NaN.",
        ("tests/test_pipeline.py::test_strips_before_the_first_key",),
    ),
    Mutant(
        "post-convolution-not-masked",
        PIPELINE,
        'return self._convolve("post_weight", p, forbidden).masked_fill(forbidden, 0)',
        'return self._convolve("post_weight", p, forbidden)',
        "A convolution after the softmax lets a query see later keys.",
        ("tests/test_pipeline.py::test_equals_reference",),
    ),
    Mutant(
        "decode-from-the-first-row",
        PIPELINE,
        "forward(\n                q_tail[b, :, tail - rows :]",
        "forward(\n                q_tail[b, :, :rows]",
        "Queries before a sequence are read instead of its own.",
        ("tests/test_pipeline.py::test_decode_equals_reference",),
    ),
    Mutant(
        "decode-one-key-late",
        PIPELINE,
        "length - rows, rows - new",
        "length - rows + 1, rows - new",
        "A new token sees the next one's key.",
        ("tests/test_pipeline.py::test_decode_equals_reference",),
    ),
    Mutant(
        "specified-mixture-transposed",
        "mtagen/naive.py",
        "goi,bgirc->bgorc",
        "gio,bgirc->bgorc",
        "The specification mixes by the transposed matrices.",
        ("tests/test_reference.py::test_pipelines_equal_brute_force",),
    ),
    Mutant(
        "specified-post-convolution-not-masked",
        "mtagen/naive.py",
        "forbidden, key_padding, mask).masked_fill(forbidden, 0)",
        "forbidden, key_padding, mask)",
        "By the specification a convolution after the softmax lets a query see later keys.",
        ("tests/test_reference.py::test_pipelines_equal_brute_force",),
    ),
    Mutant(
        "groups-that-do-not-divide-the-heads",
        "mtagen/ops/inputs.py",
        "if heads % mixed:",
        "if heads < mixed:",
        "Heads that are in no group are told of as a wrong shape.",
        ("tests/test_inputs.py::test_groups_that_do_not_divide_the_heads",),
    ),
    Mutant(
        "weights-without-a-stage",
        "mtagen/ops/inputs.py",
        "if (weight is not None) != (name in spec.weight_names):",
        "if weight is None and name in spec.weight_names:",
        "A weight that the op has no stage for is ignored.",
        ("tests/test_inputs.py::test_a_weight_that_the_op_does_not_have",),
    ),
)

MUTANTS = (*FORWARD, *BACKWARD, *DECODE, *STAGES, *HOST, *PLANNER, *SOURCES)
