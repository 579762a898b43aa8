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
    Mutant(
        "equality-of-how-numbers-are-written",
        "mtagen/expressions/given.py",
        "    for kind, name in _NAMES_OF_COMPARISONS.items():",
        "    for kind, name in [*_NAMES_OF_COMPARISONS.items()][:4]:",
        "A function's == compares objects, so that conditions are always false.",
        ("tests/test_expressions.py::test_operators_of_functions_are_those_of_texts",),
    ),
    Mutant(
        "functions-of-integers-in-the-default-dtype",
        "mtagen/evaluate.py",
        "self.of if compares_integers else self.real, expr.args",
        "self.of, expr.args",
        "log(i + 1) is computed in PyTorch's default dtype.",
        ("tests/test_expressions.py::test_functions_of_integers_have_the_dtype_of_scores",),
    ),
    Mutant(
        "conditions-that-causal-hides",
        "mtagen/expressions/bounds.py",
        "if alone is None or alone > right:",
        "if alone is not None and alone > right:",
        "A prefix that the default causal=True hides is left out without a word.",
        ("tests/test_visible.py::test_masks_that_are_refused",),
    ),
)
