"""Context parallelism."""

from __future__ import annotations

from ..mutant import Mutant

PLACES = "mtagen/distributed/places.py"

MUTANTS = (
    Mutant(
        "ranks-positions-of-queries-that-end-with-keys",
        PLACES,
        "places = call.queries.start - (call.keys.count - call.queries.count), call.keys.start",
        "places = call.queries.start, call.keys.start",
        "A condition gets wrong positions where a rank's queries do not begin as its keys do.",
        ("tests/test_distributed.py::test_conditions",),
    ),
    Mutant(
        "ranks-documents-from-the-first-row",
        PLACES,
        "return cls(queries[:-1] - begin - aligned, keys[:-1] - begin)",
        "return cls(queries[:-1] - begin, keys[:-1] - begin)",
        "A condition gets wrong positions in documents that chunks cut.",
        ("tests/test_distributed.py::test_conditions_of_documents",),
    ),
    Mutant(
        "ranks-keys-of-the-call",
        PLACES,
        "slots[name]: x.contiguous() for name, x in named",
        "slots[name]: x * (name != 'keys_before') for name, x in named",
        "A condition counts keys from the first key that a rank has.",
        ("tests/test_distributed.py::test_conditions",),
    ),
    Mutant(
        "ranks-expressions-of-positions",
        "mtagen/distributed/context_parallel.py",
        "if reads_positions and not (is_aligned and is_of_distance(text, parameters)):",
        "if reads_positions and not is_aligned:",
        "An expression of positions counts them from the first key that a rank has.",
        ("tests/test_distributed.py::test_expressions_that_are_refused",),
    ),
    Mutant(
        "ranks-heads-in-a-table",
        "mtagen/expressions/language.py",
        "sympy.Integer(0) if axis == str(HEAD) else index for index, axis in indices",
        "sympy.Integer(0) for index, axis in indices",
        "A table is indexed by heads that each rank counts from its own first.",
        ("tests/test_distributed.py::test_heads_that_are_not_spread",),
    ),
    Mutant(
        "ranks-score-parameters-whole",
        "mtagen/nn/tensor_parallel.py",
        "[(layer.score_parameters, name) for name in layer.score_parameters if name in names]",
        "[]",
        "A rank has the score parameters of all heads, and takes those of the first.",
        ("tests/test_distributed.py::test_heads",),
    ),
    Mutant(
        "ranks-own-context-missing",
        "mtagen/distributed/context_parallel.py",
        "step.context.copy_own(queries, context)",
        "pass",
        "A chunk after ones of few rows, of which one is of the same rank, convolves what memory held before.",
        ("tests/test_distributed.py::test_short_sequences",),
    ),
    Mutant(
        "ranks-own-gradients-missing",
        "mtagen/distributed/context_parallel.py",
        "of_keys, of_values = map(plan.local_gradients, (dks, dvs))",
        "of_keys, of_values = [], []",
        "Gradients of keys and values are those of the other ranks' outputs.",
        ("tests/test_distributed.py::test_pipelines",),
    ),
    Mutant(
        "ranks-keys-from-before-the-window",
        "mtagen/distributed/sharding.py",
        "min(max(call.keys.start, end), call.keys.stop)",
        "min(end, call.keys.stop)",
        "What comes for a second chunk begins where the first one's keys end, outside its tensor.",
        ("tests/test_distributed.py::test_keys_are_brought_once",),
    ),
    Mutant(
        "ranks-gradients-rounded-often",
        "mtagen/distributed/exchange.py",
        "first.to(sum_dtype(first)) + second",
        "first + second",
        "Sums of gradients in bf16 are rounded after each addition.",
        ("tests/test_distributed.py::test_gradients_of_a_chunk_are_summed",),
    ),
    Mutant(
        "ranks-gradients-summed-in-place",
        "mtagen/distributed/exchange.py",
        "first.to(sum_dtype(first)) + second",
        "first.to(sum_dtype(first)).add_(second)",
        "A sum in fp32 overwrites the first of what it adds.",
        ("tests/test_distributed.py::test_gradients_of_a_chunk_are_summed",),
    ),
)
