"""A call of an op as one record: what the registered ops, the executor and the CPU backend take.

The fields of a record are the arguments of a registered op, by name and in order.
:mod:`mtagen.ops.library` prints the op's schema from them. A new argument is a new field.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor

from .dropout import Dropout
from .spec import FACTORS, PARAMETER_SLOTS, WEIGHTS

# The differentiable fields, which come first: q, k, v, the weights, the factors of mixings, the sink and the parameters
# of expressions.
INPUTS = 3 + len(WEIGHTS) + len(FACTORS) + 1 + len(PARAMETER_SLOTS)
NO_LEARNED = (None,) * (INPUTS - 3 - len(WEIGHTS))  # the factors, the sink and the parameters of an op without them
Length: TypeAlias = Annotated[int, "SymInt"]  # an int that may be a symbol of torch.compile
SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    str: "str",
    int: "int",
    bool: "bool",
    Length: "SymInt",
}


def fields_of(record: type[tuple[Any, ...]]) -> dict[str, str]:
    """Return the type of each field of a record by its name, as schemas write it."""
    return {name: SCHEMA_TYPES[hint] for name, hint in get_type_hints(record, include_extras=True).items()}


def schema_of(record: Any) -> list[str]:
    """Return a record's fields as arguments of a schema."""
    defaults = {name: f"={value}" for name, value in record._field_defaults.items()}
    return [f"{kind} {name}{defaults.get(name, '')}" for name, kind in fields_of(record).items()]


_LEARNED = slice(3 + len(WEIGHTS), INPUTS)  # of the fields of calls and steps


def _given(*weights: Tensor | None) -> list[Tensor]:
    return [weight for weight in weights if weight is not None]


def document_of(cu_seq: Tensor, rows: Tensor) -> Tensor:
    """Return the number of the document that has each row, in the dtype of ``rows``.

    Args:
        cu_seq: (documents + 1,), the first row of each document, and the end of the last document.
        rows: numbers of rows, of the same dtype. Rows after the end belong to the last document.
    """
    ends = cu_seq[1:].contiguous()
    documents = torch.searchsorted(ends, rows, right=True, out_int32=rows.dtype == torch.int32)
    return documents.clamp(max=len(ends) - 1)


class Documents(NamedTuple):
    """Where the documents of a call begin and end.

    Attributes:
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last
            document. Rows after that end are padding.
        cu_seq_k: the same for keys.
        max_q: upper limit of a document's number of queries.
        max_k: upper limit of a document's number of keys.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class Call(NamedTuple):
    """A call of an op on a batch or on packed documents.

    Attributes:
        q: (B, H, Nq, D); packed documents have (total_q, H, D). :meth:`mtagen.Spec.arguments`
            describes the other tensors.
        weight, head_weight, post_weight, post_head_weight: the weights of the op's stages; None
            for stages that the op lacks.
        query_factors, key_factors, post_query_factors, post_key_factors: the factors of mixings that depend on
            tokens; None for those that the op lacks.
        sink, parameter0, ..., parameter7: the sink, and the parameters of expressions in the order
            of ``Spec.parameters``; None for those that the op lacks.
        scale: factor of q k^T.
        key: names the built op.
        cu_seq_q, cu_seq_k, max_q, max_k: where packed documents begin and end, see
            :class:`Documents`; a batch leaves them out.
        dropout_seed, dropout_p: see :class:`.dropout.Dropout`; a call without dropout leaves them out.
        block_table: (documents, width) int32, the pages of each document in order; k is then (pages,
            Hkv, size, D) and v (pages, Hkv, size, DV), and cu_seq_k counts keys as if they lay one after
            the other. Such a call is not differentiable. None if k and v hold documents or batches.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None
    head_weight: Tensor | None
    post_weight: Tensor | None
    post_head_weight: Tensor | None
    query_factors: Tensor | None
    key_factors: Tensor | None
    post_query_factors: Tensor | None
    post_key_factors: Tensor | None
    sink: Tensor | None
    parameter0: Tensor | None
    parameter1: Tensor | None
    parameter2: Tensor | None
    parameter3: Tensor | None
    parameter4: Tensor | None
    parameter5: Tensor | None
    parameter6: Tensor | None
    parameter7: Tensor | None
    scale: float
    key: str
    cu_seq_q: Tensor | None = None
    cu_seq_k: Tensor | None = None
    max_q: Length = 0
    max_k: Length = 0
    dropout_seed: Tensor | None = None
    dropout_p: float = 0.0
    block_table: Tensor | None = None

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the op's stages, in the order of ``spec.WEIGHTS``."""
        return _given(self.weight, self.head_weight, self.post_weight, self.post_head_weight)

    @property
    def learned(self) -> list[Tensor]:
        """The factors, the sink and the parameters, in the order of ``Spec.learned_arguments``."""
        fields: tuple[Any, ...] = self
        return _given(*fields[_LEARNED])

    @property
    def documents(self) -> Documents | None:
        """The boundaries of packed documents, or None for a batch."""
        if self.cu_seq_q is None or self.cu_seq_k is None:
            return None
        return Documents(self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k)

    @property
    def dropout(self) -> Dropout | None:
        """The dropout of the call, or None."""
        return None if self.dropout_seed is None else Dropout(self.dropout_seed, self.dropout_p)

    def split(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """Return the tensors, which autograd saves, and the other fields; :meth:`joined` inverts it."""
        return _tensors(self), _others(self)

    @classmethod
    def joined(cls, tensors: Sequence[Tensor | None], others: Sequence[Any]) -> Call:
        """Return the call that :meth:`split` has split."""
        return cls(*_in_order((*tensors, *others)))


class Step(NamedTuple):
    """A step of decoding: a few queries against a cache of keys and values.

    Attributes:
        q_tail: (B, H, context + n_new, D), the earlier queries that the new ones depend on, then
            the new ones.
        k_cache: (B, Hkv, N, D); with a block_table (pages, Hkv, size, D).
        v_cache: (B, Hkv, N, DV); with a block_table (pages, Hkv, size, DV).
        weight, head_weight, post_weight, post_head_weight, query_factors, key_factors, post_query_factors,
            post_key_factors, sink, parameter0, ..., parameter7: as in :class:`Call`. Query factors have the rows of
            ``q_tail``, and key factors those of ``k_cache``.
        cache_seqlens: (B,) int32, the number of keys in use of each entry; None means all N.
        scale: factor of q k^T.
        num_splits: number of parts into which kernels split the keys; 0 means as planned.
        key: names the built op.
        block_table: (B, width) int32, the pages of each sequence in order; None for a cache with an
            entry for each sequence. A step with pages has ``cache_seqlens``.
        max_k: with pages, the most keys of a sequence, or more.
    """

    q_tail: Tensor
    k_cache: Tensor
    v_cache: Tensor
    weight: Tensor | None
    head_weight: Tensor | None
    post_weight: Tensor | None
    post_head_weight: Tensor | None
    query_factors: Tensor | None
    key_factors: Tensor | None
    post_query_factors: Tensor | None
    post_key_factors: Tensor | None
    sink: Tensor | None
    parameter0: Tensor | None
    parameter1: Tensor | None
    parameter2: Tensor | None
    parameter3: Tensor | None
    parameter4: Tensor | None
    parameter5: Tensor | None
    parameter6: Tensor | None
    parameter7: Tensor | None
    cache_seqlens: Tensor | None
    scale: float
    num_splits: int
    key: str
    block_table: Tensor | None = None
    max_k: Length = 0

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return self.k_cache.shape[2] if self.block_table is None else self.max_k

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the op's stages, in the order of ``spec.WEIGHTS``."""
        return _given(self.weight, self.head_weight, self.post_weight, self.post_head_weight)

    @property
    def learned(self) -> list[Tensor]:
        """The factors, the sink and the parameters, in the order of ``Spec.learned_arguments``."""
        fields: tuple[Any, ...] = self
        return _given(*fields[_LEARNED])


_TENSORS, _OTHERS = (
    [i for i, kind in enumerate(fields_of(Call).values()) if kind.startswith("Tensor") is are_tensors]
    for are_tensors in (True, False)
)
_tensors, _others = itemgetter(*_TENSORS), itemgetter(*_OTHERS)
_in_order = itemgetter(*map([*_TENSORS, *_OTHERS].index, range(len(Call._fields))))
