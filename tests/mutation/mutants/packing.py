"""Packed documents and dropout between the op and the kernels."""

from __future__ import annotations

from ..mutant import Mutant

LIBRARY, EXECUTOR, OP = "mtagen/ops/library.py", "mtagen/ops/executor.py", "mtagen/ops/attention.py"
CALL = "mtagen/call.py"
TOLD = "tests/test_executor_documents.py"

MUTANTS = (
    Mutant(
        "packing-lengths-swapped-for-the-backward-pass",
        CALL,
        "return _tensors(self), _others(self)",
        "return _tensors(self), _others(self._replace(max_q=self.max_k, max_k=self.max_q))",
        "The backward pass takes the longest document's keys for its queries.",
        (f"{TOLD}::test_both_passes_are_told_where_documents_are",),
    ),
    Mutant(
        "packing-lengths-swapped",
        CALL,
        "self.max_q, self.max_k",
        "self.max_k, self.max_q",
        "Both passes take the longest document's keys for its queries.",
        (f"{TOLD}::test_both_passes_are_told_where_documents_are",),
        within="Call.documents",
    ),
    Mutant(
        "packing-starts-in-strides",
        EXECUTOR,
        "x.contiguous() if isinstance(x, Tensor) else x for x in values",
        "x for x in values",
        "Kernels read neighbours of `cu_seq` that is a column of a table, and likewise of seeds.",
        (
            f"{TOLD}::test_both_passes_are_told_where_documents_are",
            f"{TOLD}::test_both_passes_are_told_what_is_dropped",
        ),
        within="_as_passed",
    ),
    Mutant(
        "packing-kernels-of-the-other-variant",
        EXECUTOR,
        "self.variants(documents is not None, dropout is not None, page_size)",
        "self.variants(dropout is not None, documents is not None, page_size)",
        "Packed documents go to kernels for dropout, and batches with dropout to kernels for documents.",
        (f"{TOLD}::test_both_passes_are_told_what_is_dropped",),
    ),
    Mutant(
        "packing-dropout-of-documents-alone",
        EXECUTOR,
        "(documents is None and dropout is None and page_size is None)",
        "(documents is None and page_size is None)",
        "Batches with dropout go to kernels that drop nothing.",
        (f"{TOLD}::test_both_passes_are_told_what_is_dropped",),
    ),
    Mutant(
        "packing-dropout-before-documents",
        EXECUTOR,
        "*_as_passed(documents), *_as_passed(dropout), deterministic",
        "*_as_passed(dropout), *_as_passed(documents), deterministic",
        "The backward kernels take the seed for where documents begin.",
        (f"{TOLD}::test_both_passes_are_told_where_documents_are",),
    ),
    Mutant(
        "packing-sums-of-no-scores-in-rows",
        EXECUTOR,
        "rows = q.shape[:3] if documents is None else (q.shape[1], q.shape[0])",
        "rows = q.shape[:3] if documents is None else (q.shape[0], q.shape[1])",
        "Without a key, log-sum-exps of packed documents have another shape than otherwise.",
        (f"{TOLD}::test_documents_without_scores",),
    ),
    Mutant(
        "packing-documents-launched-without-keys",
        EXECUTOR,
        "if _sees_nothing(q, k, documents):",
        "if q.numel() == 0:",
        "Kernels are launched for documents without a key, on buffers of no element.",
        (f"{TOLD}::test_documents_without_scores",),
        within="Executor.forward",
    ),
    Mutant(
        "packing-backward-launched-without-queries",
        EXECUTOR,
        "if _sees_nothing(q, k, documents):",
        "if k.numel() == 0:",
        "Backward kernels are launched for documents without a query.",
        (f"{TOLD}::test_documents_without_scores",),
        within="Executor.backward",
    ),
    Mutant(
        "packing-sums-in-rows-before-they-are-computed",
        LIBRARY,
        "(q.shape[1], q.shape[0])",
        "(q.shape[0], q.shape[1])",
        "What is compiled takes log-sum-exps of packed documents for transposed ones.",
        (f"{TOLD}::test_shapes_of_documents_are_known_beforehand",),
        within="fake_forward",
    ),
    Mutant(
        "packing-forward-told-the-queries-twice",
        OP,
        "documents = cu_seq_q, cu_seq_k, max_q, max_k",
        "documents = cu_seq_q, cu_seq_k, max_q, max_q",
        "Kernels take documents for shorter than their keys, or longer.",
        (f"{TOLD}::test_both_passes_are_told_where_documents_are",),
    ),
)
