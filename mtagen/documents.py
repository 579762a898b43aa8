"""Packed documents: sequences that lie one after another in tensors without a batch axis."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
