"""Cases to measure, as values: one pass of one operator at one size. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from typing import Any, NamedTuple

from ..spec import EXPRESSIONS, DType, Spec

PAPER = (6, 11)  # the kernel of the paper
TRAINING_PASSES = ("forward", "backward", "forward+backward")
LENGTH = 8192  # tokens of a sequence, for measurements at a single length
CACHE_LENGTH = 32768  # tokens of a decode cache, for measurements at a single length
DROPOUT_P = 0.1  # dropout probability in timed calls
DOCUMENTS = (8192, 6144, 4096, 3072, 2560, 2048, 1536, 1280, 1024, 768, 640, 512, 384, 256, 160, 96)  # 32768 tokens

_ROW_SPEC = ("kernel", "head_dim", "causal", "dtype")  # fields of the spec in every row of results


class Sizes(NamedTuple):
    """Sizes of one problem.

    Attributes:
        batch: sequences, or packed documents.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        nq: queries of a sequence, or of the longest document; for decode the new tokens.
        nk: keys of a sequence, or of the longest document; for decode the length of the cache.
    """

    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int


@dataclass(frozen=True)
class Scale:
    """Sizes for a kind of device.

    Attributes:
        dtype: dtype of q, k and v.
        heads: heads of queries, and of keys where they are not grouped.
        tokens: largest number of tokens in a batch of sequences.
        decode_batch: sequences of a decode step whose caches have at most ``CACHE_LENGTH`` tokens
            each; with longer caches a step has one sequence.
    """

    dtype: DType
    heads: int
    tokens: int
    decode_batch: int

    def training(self, n: int, batch: int | None = None) -> Sizes:
        """Sizes of self-attention on sequences of ``n`` tokens."""
        return Sizes(batch or max(1, self.tokens // n), self.heads, self.heads, n, n)

    def decode(self, n: int, *, new_tokens: int = 1, kv_heads: int | None = None) -> Sizes:
        """Sizes of a decode step on caches of ``n`` tokens."""
        batch = self.decode_batch if n <= CACHE_LENGTH else 1
        return Sizes(batch, self.heads, kv_heads or self.heads, new_tokens, n)

    def decode_steps(self, n: int) -> tuple[Sizes, Sizes, Sizes]:
        """Sizes of three decode steps: one new token; one with grouped heads; several, as
        speculative decoding has.
        """
        return self.decode(n), self.decode(n, kv_heads=self.heads // 4), self.decode(n, new_tokens=4)


SCALES = {
    "cuda": Scale("bf16", heads=16, tokens=8192, decode_batch=8),
    "cpu": Scale("fp32", heads=8, tokens=1, decode_batch=1),
}


@dataclass(frozen=True)
class Case:
    """One pass of one operator at one size.

    Attributes:
        spec: the operator.
        sizes: sizes of its arguments.
        pass_name: one of ``TRAINING_PASSES``, or ``decode``.
    """

    spec: Spec
    sizes: Sizes
    pass_name: str

    @property
    def decodes(self) -> bool:
        """Whether the pass is decode."""
        return self.pass_name == "decode"

    @property
    def causal(self) -> bool:
        """Whether later keys are hidden."""
        return self.spec.causal

    @property
    def problem(self) -> Case:
        """The case that stands for all training passes at the same sizes; a decode case stands for
        itself.
        """
        return self if self.decodes else replace(self, pass_name="forward")

    @property
    def base(self) -> Case:
        """The same case without window, dropout, packing, pages, expressions and sink, as a baseline
        for their cost.
        """
        rules: dict[str, Any] = dict.fromkeys((*EXPRESSIONS, "visible")) | {"parameters": (), "constants": ()}
        plain = replace(self.spec, window=(-1, -1), packed=False, dropout=False, page_size=None, sink=False, **rules)
        return replace(self, spec=plain)

    @property
    def documents(self) -> list[int]:
        """Tokens of each packed document, in the proportions of ``DOCUMENTS``; the longest document
        has ``nk``.
        """
        batch, longest = (self.sizes.batch, self.sizes.nk) if self.spec.packed else (0, 0)
        return [max(1, n * longest // DOCUMENTS[0]) for n in islice(cycle(DOCUMENTS), batch)]

    @property
    def visible_scores(self) -> int:
        """Number of scores, over all heads and sequences, of keys that their row sees."""
        batch, heads, _, nq, nk = self.sizes
        sequences = [(n, n) for n in self.documents] if self.spec.packed else [(nq, nk)] * batch
        return heads * sum(visible_pairs(*lengths, self.spec.left, self.spec.right) for lengths in sequences)

    @property
    def score_bytes(self) -> int:
        """Bytes of one materialised tensor of scores."""
        batch, heads, _, nq, nk = self.sizes
        return batch * heads * nq * nk * self.spec.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of q and out together, or of their gradients."""
        rows = sum(self.documents) if self.spec.packed else self.sizes.batch * self.sizes.nq
        return rows * self.sizes.heads * self._bytes_of_both_dims

    @property
    def cache_bytes(self) -> int:
        """Bytes of k and v together, or of their gradients."""
        keys = sum(self.documents) if self.spec.packed else self.sizes.batch * self.sizes.nk
        return keys * self.sizes.kv_heads * self._bytes_of_both_dims

    @property
    def _bytes_of_both_dims(self) -> int:
        return (self.spec.head_dim + self.spec.value_head_dim) * self.spec.itemsize

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a row of results that identify the case; :meth:`from_dict` inverts
        it.

        An optional field of the spec is present only where it differs from its default, so that
        rows of earlier versions, which lack a field, compare with rows of this version.
        """
        spec, plain = self.spec.to_dict(), Spec(self.spec.kernel, self.spec.head_dim).to_dict()
        special = {name: value for name, value in spec.items() if name not in _ROW_SPEC and value != plain[name]}
        return {name: spec[name] for name in _ROW_SPEC} | special | self.sizes._asdict() | {"pass": self.pass_name}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Case:
        """Return the case of a row of results; other fields of the row are ignored.

        Raises:
            KeyError: a field is missing.
            SpecError: the operator is not legal.
            TypeError: the kernel is not a sequence.
        """
        special = {name: row[name] for name in Spec.__dataclass_fields__ if name in row}
        spec = Spec.from_dict({name: row[name] for name in _ROW_SPEC} | special)
        return cls(spec, Sizes(*(row[name] for name in Sizes._fields)), row["pass"])


@cache
def visible_pairs(nq: int, nk: int, left: int | None, right: int | None) -> int:
    """Return the number of pairs of a row and a key that the row sees, in one head of one sequence."""
    pairs = 0
    for position in range(nk - nq, nk):
        first = 0 if left is None else max(0, position - left)
        end = nk if right is None else min(nk, position + right + 1)
        pairs += max(0, end - first)
    return pairs


ROW_KEYS = (*_ROW_SPEC, *Sizes._fields, "pass")  # fields that identify the case in every row of results
