"""The alignment of queries to keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from sympy import Expr

from .affine import N_K, N_Q

Length = TypeVar("Length", int, Expr)


@dataclass(frozen=True)
class Sequence(Generic[Length]):
    """A sequence whose queries are aligned to the end of the keys: query i sits at position i +
    offset.

    Attributes:
        n_q: number of queries; a symbol if it is printed into a kernel.
        n_k: number of keys; a symbol if it is printed into a kernel.
    """

    n_q: Length
    n_k: Length

    @property
    def offset(self) -> Length:
        """Position of the first query; negative when there are more queries than keys."""
        return self.n_k - self.n_q


SEQUENCE: Sequence[Expr] = Sequence(N_Q, N_K)  # the sequence of a kernel's call
