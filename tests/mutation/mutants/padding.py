"""Rows behind the last document, sizes of grids, and what the CPU's strips do with hidden keys and with memory."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED_DOCUMENTS, INTERPRETED_DOCUMENTS, PIPELINE, TRITON, Mutant

_PIPELINE, _GRIDS = "tests/test_pipeline.py", "tests/test_grids.py"
_BEHIND = "test_rows_behind_the_last_document"

MUTANTS = (
    Mutant(
        "padding-queries-are-of-no-document",
        "mtagen/templates/host/documents.py",
        "cu_seq_q[-1:], rest_q",
        "cu_seq_q[-1:], cu_seq_q[-1:]",
        "Outputs behind the last document are whatever the memory held.",
        (f"{EMULATED_DOCUMENTS}::{_BEHIND}",),
    ),
    Mutant(
        "padding-keys-are-of-no-document",
        "mtagen/templates/host/documents.py",
        "cu_seq_k.new_full((2,), total_k)",
        "cu_seq_k[-1:].repeat(2)",
        "Gradients of keys behind the last document are whatever the memory held.",
        (f"{EMULATED_DOCUMENTS}::{_BEHIND}",),
    ),
    Mutant(
        "padding-keys-are-loaded",
        f"{CUDA}/packed.cuh",
        "return n_q > 0 ? n_k : 0;",
        "return n_k;",
        "NaN in keys that no query meets reaches the gradient of W.",
        (f"{EMULATED_DOCUMENTS}::{_BEHIND}",),
    ),
    Mutant(
        "padding-vectors-reach-lifted-weights",
        f"{TRITON}/finish.j2",
        "x < _with_partner({{ side.owned.length }}, {{ side.other.length }})",
        "x < n_x",
        "NaN in rows behind the last document reaches the gradient of W.",
        (f"{INTERPRETED_DOCUMENTS}::{_BEHIND}",),
    ),
    Mutant(
        "padding-scores-reach-weights-of-the-band",
        f"{TRITON}/finish.j2",
        "row < _with_partner(n_q, n_k)",
        "row < n_q",
        "NaN in rows behind the last document reaches the gradient of W by the band.",
        (f"{INTERPRETED_DOCUMENTS}::{_BEHIND}",),
    ),
    Mutant(
        "padding-refused-on-the-cpu",
        "mtagen/ops/checks.py",
        "values[-1] > total",
        "values[-1] != total",
        "The CPU refuses rows behind the last document.",
        (f"tests/test_documents.py::{_BEHIND}",),
    ),
    Mutant(
        "grids-of-one-layer",
        "mtagen/planner/tile/layout.py",
        "return ceiling(blocks / GRID_YZ)",
        "return Integer(1)",
        "Many tiles exceed the limit of a grid's y.",
        (f"{_GRIDS}::test_tiles_fill_layers_of_a_grid",),
    ),
    Mutant(
        "grids-of-schedules-without-layers",
        "mtagen/templates/host/documents.py",
        "// layers) * layers",
        "// layers) * 1",
        "The last layer of a grid reads tiles behind the schedule.",
        (f"{_GRIDS}::test_a_schedule_fills_layers",),
    ),
    Mutant(
        "grids-of-long-sections",
        "mtagen/templates/host/sections.py",
        "if tiles > most:",
        "if tiles > 2 * most:",
        "A sequence of too many tiles is refused by the driver, after other kernels ran.",
        (f"{_GRIDS}::test_a_sequence_of_too_many_tiles",),
    ),
    Mutant(
        "cpu-strips-of-any-shape",
        PIPELINE,
        "multiple = 1 << min(max(n.bit_length() - 4, 0), 8)",
        "multiple = 1",
        "oneDNN keeps a primitive for each number of keys.",
        (f"{_PIPELINE}::test_few_shapes_are_convolved",),
    ),
    Mutant(
        "cpu-hidden-values-times-zero",
        PIPELINE,
        "result += term.masked_fill(unused[:, j, None], 0)",
        "result += term",
        "NaN in a hidden value reaches outputs.",
        (f"{_PIPELINE}::test_hidden_keys_and_values_are_not_read",),
    ),
)
