"""Packed documents: sequences one after the other in tensors without an axis for the batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Documents(NamedTuple):
    """Where documents begin and end.

    Attributes:
        cu_seq_q: (documents + 1,) int32, the first query of each, and the end of the last; rows behind it are padding.
        cu_seq_k: likewise of keys.
        max_q: queries of a document, at most.
        max_k: keys of a document, at most.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
