"""What the specification, and the models around the layer, must refuse."""

from __future__ import annotations

from ..mutant import Mutant

EAGER, TESTS = "mtagen/eager.py", ("tests/test_reference.py",)

MUTANTS = (
    Mutant(
        "reference-drops-nothing-without-a-mask",
        EAGER,
        "if p != 0:",
        "if p < 0:",
        "The specification ignores a probability of dropout.",
        TESTS,
    ),
    Mutant(
        "reference-takes-a-mask-of-another-shape",
        EAGER,
        "if got != (shape, torch.bool, device):",
        "if got[1:] != (torch.bool, device):",
        "A mask of other rows and keys is broadcast, or fails in PyTorch.",
        TESTS,
    ),
    Mutant(
        "reference-takes-every-rule",
        EAGER,
        "        **rules,\n",
        "",
        "A window that no op has is taken for another.",
        TESTS,
    ),
    Mutant(
        "reference-takes-every-batch",
        EAGER,
        "check_batch(tensors, (q.shape[-1], v.shape[-1]))",
        "pass",
        "Batches, ranks and dtypes that ops refuse are broadcast.",
        TESTS,
    ),
    Mutant(
        "reference-takes-every-weight",
        EAGER,
        "shaped_weight(tensors[0], name, weight, m, (heads // m, m, m) if m else (heads, *kernels[name]))",
        "pass",
        "Weights are reshaped into what was not meant.",
        TESTS,
    ),
    Mutant(
        "model-ignores-where-keys-documents-begin",
        "mtagen/transformers/calls.py",
        'if given(name) is not None and given("cu_seq_lens_q") is None:',
        "if given(name) is False:",
        "Documents that are named by their keys alone see each other.",
        ("tests/test_transformers.py::test_illegal_calls",),
    ),
)
