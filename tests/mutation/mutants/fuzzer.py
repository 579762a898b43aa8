"""The fuzzer, which would pass over faults, and faults that it has found."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED_STRIP, Mutant

FUZZ, TESTS = "tests/fuzz", "tests/test_fuzz.py"
MUTANTS = (
    Mutant(
        "fuzzer-without-gradients",
        f"{FUZZ}/check.py",
        "None if self.decodes else grad_out",
        "None",
        "Gradients are not judged.",
        (f"{TESTS}::test_a_planted_fault_is_found[gradient]",),
    ),
    Mutant(
        "fuzzer-leaves-hidden-keys",
        f"{FUZZ}/check.py",
        "k=spoilt(inputs.k, keys, 1, case.hidden)",
        "k=inputs.k",
        "Hidden keys are not replaced.",
        (f"{TESTS}::test_a_planted_fault_is_found[hidden]",),
    ),
    Mutant(
        "fuzzer-asks-for-no-sums",
        f"{FUZZ}/case.py",
        "return_lse=random.random() < 0.5",
        "return_lse=random.random() < 0",
        "The log-sum-exp is never asked for.",
        (f"{TESTS}::test_a_planted_fault_is_found[lse]",),
    ),
    Mutant(
        "fuzzer-fills-no-caches",
        f"{FUZZ}/check.py",
        "laid_out(x.masked_fill(hides[:, None, :, None], torch.nan), layout)",
        "laid_out(x.masked_fill(hides[:, None, :, None], 0), layout)",
        "Caches hold zeros behind the keys in use, which an op may read.",
        (f"{TESTS}::test_a_planted_fault_is_found[capacity]",),
    ),
    Mutant(
        "fuzzer-shrinks-to-another-fault",
        f"{FUZZ}/shrink.py",
        "if kinds(smaller) & wanted:",
        "if kinds(smaller):",
        "A smaller case may fail for another reason than the case that it stands for.",
        (f"{TESTS}::test_a_failing_case_shrinks",),
    ),
    Mutant(
        "fuzzer-has-one-seed",
        f"{FUZZ}/case.py",
        'Random(f"{backend} {seed} {index} call")',
        'Random(f"{backend} {index} call")',
        "Other seeds repeat calls.",
        (f"{TESTS}::test_seeds_and_numbers_change_all_data",),
    ),
    Mutant(
        "step-spreads-what-is-no-number",
        f"{CUDA}/plane_step.cu.j2",
        "second = s + 1 < i + CQ",
        "second = true",
        "A new token whose key holds NaN spoils the token before it, which must not see it.",
        (f"{EMULATED_STRIP}::test_rows_of_a_decode_step_that_hold_no_numbers",),
    ),
    Mutant(
        "kernels-of-documents-without-keys",
        "mtagen/ops/executor.py",
        "or documents.max_q == 0 or documents.max_k == 0)",
        "or documents.max_q == 0)",
        "Strips divide by the bytes of a row of scores, which are none, where all keys are behind the last document.",
        ("tests/test_executor.py::test_no_scores_of_packed_documents",),
    ),
)
