"""Mixings of heads that depend on tokens: what queries and keys add to a mixing by a matrix.

Planes are ``[groups, m, rows, keys]``. A token's factors are ``[H, tokens, 2 R + 1]``: R entries by which heads are
summed, R by which the sums are added to heads, and a gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenTerm(NamedTuple):
    """The term that the queries, or the keys, of a strip add to a mixing.

    Attributes:
        factors: ``[H, tokens, 2 R + 1]``.
        gradient: the gradient of ``factors``, to which :func:`backward` adds.
        of_keys: whether the tokens are the keys.
    """

    factors: Tensor
    gradient: Tensor
    of_keys: bool

    @property
    def token(self) -> str:
        """The axis of tokens, as einsum names it."""
        return "j" if self.of_keys else "i"

    def parts(self, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors that sum heads, those that add the sums, and the gates, by group."""
        return _parts(self.factors, groups)


def _parts(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    rank = x.shape[-1] // 2
    inner, outer, gate = torch.split(torch.unflatten(x, 0, (groups, -1)), [rank, rank, 1], -1)
    return inner, outer, gate


def forward(x: Tensor, term: TokenTerm) -> Tensor:
    """Return what the tokens add to the mixture of a plane."""
    (inner, outer, gate), t = term.parts(len(x)), term.token
    summed = torch.einsum(f"gm{t}f,gmij->gfij", inner, x)
    return torch.einsum(f"gm{t}f,gfij->gmij", outer, summed) + torch.einsum(f"gm{t}f,gmij->gmij", gate, x)


def backward(x: Tensor, dy: Tensor, term: TokenTerm) -> Tensor:
    """Return the gradient of the plane, and add that of the factors to ``term.gradient``."""
    (inner, outer, gate), t = term.parts(len(x)), term.token
    summed, dsummed = torch.einsum(f"gm{t}f,gmij->gfij", inner, x), torch.einsum(f"gm{t}f,gmij->gfij", outer, dy)
    dinner, douter, dgate = _parts(term.gradient, len(x))
    dinner += torch.einsum(f"gfij,gmij->gm{t}f", dsummed, x)
    douter += torch.einsum(f"gfij,gmij->gm{t}f", summed, dy)
    dgate += torch.einsum(f"gmij,gmij->gm{t}", x, dy).unsqueeze(-1)
    return torch.einsum(f"gm{t}f,gfij->gmij", inner, dsummed) + torch.einsum(f"gm{t}f,gmij->gmij", gate, dy)
