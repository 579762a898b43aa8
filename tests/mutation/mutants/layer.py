"""The layer and its cache."""

from __future__ import annotations

from ..mutant import Mutant

MUTANTS = (
    Mutant(
        "removed-tokens-leave-their-queries",
        "mtagen/nn/cache.py",
        "held.copy_(held.roll(tokens, 2))",
        "pass",
        "Tokens that follow removed ones are convolved with the removed queries.",
        ("tests/test_nn.py::test_tokens_taken_back",),
    ),
    Mutant(
        "removable-grows-past-the-spare-queries",
        "mtagen/nn/cache.py",
        "self.floors.copy_(self._floors())",
        "pass",
        "Tokens are taken back twice, though queries are held for once.",
        ("tests/test_nn.py::test_tokens_that_cannot_be_taken_back",),
    ),
    Mutant(
        "layer-head-kernel-as-the-op-takes-it",
        "mtagen/nn/stages.py",
        "local(holder.head_kernel).mT",
        "local(holder.head_kernel)",
        "Groups of heads are mixed by the transposes of the authors' matrices.",
        ("tests/test_nn.py::test_is_the_authors_layer",),
    ),
    Mutant(
        "layer-head-kernel-loaded-untransposed",
        "mtagen/nn/layer.py",
        "kernel[0].T",
        "kernel[0]",
        "A state dict with the other spelling loads as the transposed mixture.",
        ("tests/test_nn.py::test_head_kernel_of_all_heads",),
    ),
    Mutant(
        "layer-drops-when-it-is-evaluated",
        "mtagen/nn/layer.py",
        "self.dropout if self.training else 0",
        "self.dropout",
        "Evaluation drops.",
        ("tests/test_nn.py::test_dropout",),
    ),
    Mutant(
        "layer-keeps-the-queries-before-the-new-ones",
        "mtagen/nn/cache.py",
        "held[:, :, count:]",
        "held[:, :, : context + self.spare]",
        "The next call convolves with queries that are too old.",
        ("tests/test_nn.py::test_generation",),
    ),
    Mutant(
        "layer-takes-queries-before-the-first",
        "mtagen/nn/cache.py",
        "min(context, self.read_longest())",
        "context",
        "A prompt is convolved with what the cache's buffer of queries happens to hold.",
        ("tests/test_nn.py::test_generation_reads_nothing_but_what_was_written",),
    ),
    Mutant(
        "layer-entries-of-different-lengths-as-one",
        "mtagen/nn/cache.py",
        "cache.ragged or cache.longest != longest",
        "cache.ragged",
        "Prompts of different lengths continue as if all were as long as the longest.",
        ("tests/test_nn.py::test_entries_of_different_lengths",),
    ),
    Mutant(
        "layer-chosen-entries-as-one",
        "mtagen/nn/cache.py",
        "self.ragged and len(entries) > 1, None if",
        "False, None if",
        "Entries of different lengths that are chosen from a cache continue as if all were as long as the longest.",
        ("tests/test_nn.py::test_entries_of_different_lengths",),
    ),
    Mutant(
        "layer-positions-of-the-document-before",
        "mtagen/nn/rope.py",
        "right=True",
        "right=False",
        "The first token of a document counts on from the document before.",
        ("tests/test_nn.py::test_documents",),
    ),
    Mutant(
        "layer-norm-rounds-once",
        "mtagen/nn/parts.py",
        "normed.to(x.dtype) * local(self.weight)",
        "(normed * local(self.weight)).to(x.dtype)",
        "In 16 bits results differ from the authors' by a rounding.",
        ("tests/test_nn.py::test_norm_rounds_as_the_authors",),
    ),
)
