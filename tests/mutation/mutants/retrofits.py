"""Stages in the attention of other models."""

from __future__ import annotations

from ..mutant import Mutant

FAMILIES, STAGES = "mtagen/transformers/families.py", "mtagen/transformers/stages.py"
RETROFIT = "mtagen/transformers/retrofit.py"
TESTS = "tests/test_retrofit.py"
SAME = f"{TESTS}::test_same_tokens_as_before"

MUTANTS = (
    Mutant(
        "retrofit-sees-a-key-too-many",
        STAGES,
        "self.window - 1",
        "self.window",
        "A window of w keys, the query's own included, becomes one of w + 1.",
        (f"{SAME}[mistral]",),
    ),
    Mutant(
        "retrofit-scales-by-the-head-dim",
        STAGES,
        ', "scale": scaling}',
        "}",
        "Scores of Gemma are divided by the root of another number.",
        (f"{SAME}[gemma2]",),
    ),
    Mutant(
        "retrofit-without-the-cap",
        STAGES,
        "None if self.cap is None else softcap(self.cap)",
        "None",
        "Scores of Gemma 2 are not bounded.",
        (f"{SAME}[gemma2]",),
    ),
    Mutant(
        "retrofit-ignores-windows-that-change",
        STAGES,
        "if got != mine:",
        "if False:",
        "A module whose window changes goes on with the old one.",
        (f"{TESTS}::test_an_op_of_another_attention_is_refused",),
    ),
    Mutant(
        "retrofit-never-drops",
        STAGES,
        'options["dropout_p"] = dropout',
        "pass",
        "Training goes without dropout.",
        (f"{TESTS}::test_dropout",),
    ),
    Mutant(
        "retrofit-layers-share-options",
        FAMILIES,
        "self.layer_overrides.get(str(layer), {})",
        "self.layer_overrides.get(layer, {})",
        "All layers have the options of the model.",
        (f"{TESTS}::test_saved_and_loaded[mixtral]",),
    ),
    Mutant(
        "retrofit-initialises-loaded-stages",
        "mtagen/transformers/features.py",
        "parameter.copy_(value)",
        "pass",
        "A checkpoint that is loaded with a further stage loses the others.",
        (f"{TESTS}::test_loaded_with_a_further_stage", "tests/test_transformers.py::test_loaded_with_a_further_stage"),
    ),
    Mutant(
        "retrofit-saves-names-of-the-family",
        RETROFIT,
        'vars(ours).pop("_weight_conversions", None)',
        "pass",
        "A saved mixture of experts has names that loading does not know.",
        (f"{TESTS}::test_saved_and_loaded[mixtral]",),
    ),
    Mutant(
        "retrofit-keeps-misspelled-options",
        FAMILIES,
        "check_names(others, _OPTIONS, theirs)",
        "pass",
        "A configuration with kernal=... has the default filter.",
        (f"{TESTS}::test_configurations_refuse_options_without_effect",),
    ),
)
