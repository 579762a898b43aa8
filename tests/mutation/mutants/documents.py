"""Packed documents."""

from __future__ import annotations

from ..mutant import CUDA, EMULATED_DOCUMENTS, INTERPRETED_DOCUMENTS, INTERPRETED_DROPOUT, TRITON, Mutant

MUTANTS = (
    Mutant(
        "documents-length-of-the-rest",
        f"{CUDA}/packed.cuh",
        "n_k = cu_seq_k[b + 1] - k0;",
        "n_k = cu_seq_k[gridDim.y - 1] - k0;",
        "Keys of later documents are seen.",
        (f"{EMULATED_DOCUMENTS}::test_accurate",),
    ),
    Mutant(
        "documents-statistics-without-room",
        "mtagen/planner/tile/grids.py",
        "return ROW_TILE + 2 * self.geometry.rows",
        "return 0 if self.spec.packed else ROW_TILE + 2 * self.geometry.rows",
        "The last steps of a document take the next one's log-sum-exps for rows that do not exist.",
        (f"{EMULATED_DOCUMENTS}::test_nothing_leaks",),
    ),
    Mutant(
        "documents-share-a-place-of-keys",
        f"{CUDA}/packed.cuh",
        "return k0 / rows + b + block;",
        "return k0 / rows + block;",
        "Two CTAs count the rows of dQ that they have added to in one place, so that a third one adds too early.",
        (f"{EMULATED_DOCUMENTS}::test_no_races_and_the_same_bits_again",),
    ),
    Mutant(
        "documents-with-later-tiles-before",
        "mtagen/templates/host/documents.py",
        '"earlier": blocks[document] - number',
        '"earlier": number + 1',
        "CTAs wait for others of their document that have no room to run while they wait.",
        ("tests/test_documents.py::test_schedule_of_tiles",),
    ),
    Mutant(
        "documents-log-sum-exps-of-the-first-head",
        f"{CUDA}/packed.cuh",
        "return static_cast<long long>(h) * pitch + q0 + i;",
        "return q0 + i;",
        "All heads write the log-sum-exps of the first.",
        (f"{EMULATED_DOCUMENTS}::test_accurate",),
    ),
    Mutant(
        "lifted-documents-that-begin-before",
        f"{TRITON}/tiles.j2",
        "((i >= 0) & (i < rows))",
        "(i < rows)",
        "A halo of queries is that of the document before.",
        (f"{INTERPRETED_DOCUMENTS}::test_nothing_leaks",),
    ),
    Mutant(
        "lifted-documents-without-queries",
        f"{TRITON}/packed.py",
        "begin >= tl.maximum(n_q, 1)",
        "begin >= n_q",
        "The gradient of keys that no query sees is never written.",
        (f"{INTERPRETED_DOCUMENTS}::test_accurate",),
    ),
    Mutant(
        "lifted-documents-places-from-batches",
        f"{TRITON}/packed.py",
        "// _TILE + document)",
        "// _TILE)",
        "Documents share rows of the workspace.",
        (f"{INTERPRETED_DOCUMENTS}::test_accurate",),
    ),
    Mutant(
        "lifted-documents-keys-to-the-end-of-a-vector",
        f"{TRITON}/backward.j2",
        "{% elif not by_descriptor %}\n        p = tl.where(_exists(cols[None, :], n_k), p, 0.0)",
        "{% elif not by_descriptor %}\n        p = tl.where(_exists(cols[None, :], n_k + 16), p, 0.0)",
        "Behind a row of g there is infinity, which the product with zeros makes NaN.",
        (f"{INTERPRETED_DOCUMENTS}::test_keys_that_do_not_fill_a_vector",),
    ),
    Mutant(
        "lifted-dropout-of-the-first-keys",
        f"{TRITON}/pieces.j2",
        "rows, j0 // {{ DROPOUT_GROUP }}, threshold",
        "rows, 0, threshold",
        "All tiles of keys drop as the first one does.",
        (f"{INTERPRETED_DROPOUT}::test_each_pass_keeps_what_the_mask_says",),
    ),
    Mutant(
        "lifted-dropout-of-the-first-document",
        f"{TRITON}/pieces.j2",
        "drawn = sequence * n_heads + {{ head }}",
        "drawn = {{ head }}",
        "All documents drop as the first one does.",
        (f"{INTERPRETED_DROPOUT}::test_documents",),
    ),
)
