"""Parameters of logits and sinks, in CUDA's kernels."""

from __future__ import annotations

from ..mutant import CUDA, Mutant

EMULATED_LEARNED, INTERPRETED_LEARNED = "tests/test_emulated_learned.py", "tests/interpreter/test_learned.py"

MUTANTS = (
    Mutant(
        "sink-left-out-of-splits",
        f"{CUDA}/combine.j2",
        "total += exp2_fast(sink_logit - peak);",
        "",
        "Outputs whose keys are split are as large as without a sink.",
        (f"{EMULATED_LEARNED}::test_forward",),
    ),
    Mutant(
        "sink-of-another-head-in-decode",
        f"{CUDA}/decode_results.j2",
        "x.sink + work.head + pair / work.n_new",
        "x.sink + work.head",
        "All heads of a CTA have the sink of the first.",
        (f"{EMULATED_LEARNED}::test_decode",),
    ),
    Mutant(
        "sink-gradient-of-rows-behind-the-documents",
        f"{CUDA}/host.py.j2",
        'torch.where(row_lse < float("inf"), of_rows, 0.0)',
        "of_rows",
        "What rows behind the last document hold gets into the gradient of sinks.",
        (f"{EMULATED_LEARNED}::test_documents",),
    ),
    Mutant(
        "sink-left-out-of-totals",
        f"{CUDA}/row_softmax_backward.cu.j2",
        "- log_sums[n] - LOG2_PROBABILITY_SCALE)",
        "- INFINITY)",
        "Rows whose probabilities are normalised again have gradients as without a sink.",
        ("tests/interpreter/test_cuda_strip.py::test_backward_of_a_fused_forward",),
    ),
    Mutant(
        "sink-gradient-of-the-last-strip",
        f"{CUDA}/row_softmax_backward.cu.j2",
        "minus_dot[place.query(n, sequence.query(r), n_q, lane)] -= dots[n];",
        "minus_dot[place.query(n, sequence.query(r), n_q, lane)] = -dots[n];",
        "The gradient of sinks lacks the part of the strip before, in whose rows others are context.",
        (f"{INTERPRETED_LEARNED}::test_all_passes",),
    ),
    Mutant(
        "parameter-of-another-document",
        "mtagen/planner/strip/rows.py",
        "sequence.key0 - sequence.unseen",
        "sequence.key0",
        "A strip in a window reads the tokens of later keys.",
        (f"{INTERPRETED_LEARNED}::test_documents",),
    ),
    Mutant(
        "parameter-of-hidden-keys",
        f"{CUDA}/forward_sm90.cu.j2",
        'parameters_of("work", " + work.unseen")',
        'parameters_of("work")',
        "Keys at the end of a document read the entry of an earlier key, if a window hides the first keys.",
        (f"{EMULATED_LEARNED}::test_parameters_of_tokens_of_documents",),
    ),
    Mutant(
        "parameter-sum-of-the-heads-before",
        f"{CUDA}/backward_sm80.cu.j2",
        "    ParameterSums parameter_sums;",
        "    static ParameterSums parameter_sums;",
        "Sums for gradients of a head begin with those of the head before.",
        (f"{EMULATED_LEARNED}::test_training",),
    ),
    Mutant(
        "parameter-sum-of-other-positions",
        f"{CUDA}/backward_scores.j2",
        "const int position = cta.c0 - cta.ahead + step * ROWS",
        "const int position = cta.c0 - cta.ahead",
        "Gradients of parameters have the distances of the first step's rows.",
        (f"{EMULATED_LEARNED}::test_training",),
    ),
)
