"""How many parts are made of the keys where there is too little else to share out: of a few rows, or heads."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from .geometry.mask import Mask

_N_MAX, _N_NEW = sympy.symbols("n_max n_new", integer=True, positive=True)  # keys of a cache, and new tokens
_MIN_TILES = 4  # a split shorter than this spends its time on starting
_MAX_WAVES = 4


@dataclass(frozen=True)
class SplitRule:
    """What the number of splits is chosen with at run time, by ``templates/host/splits.py``.

    Attributes:
        slots: CTAs the target holds at once.
        min_keys: keys of a split, at least.
        max_waves: rounds of ``slots`` CTAs, at most, that splitting may make.
    """

    slots: int
    min_keys: int
    max_waves: int


def split_rule(resident: int, block_n: int, multiprocessors: int, max_waves: int = _MAX_WAVES) -> SplitRule:
    """The rule for a kernel of which a multiprocessor holds ``resident`` CTAs."""
    return SplitRule(resident * multiprocessors, _MIN_TILES * block_n, max_waves)


def split_keys(mask: Mask) -> Expr:
    """Keys of a cache that are split, at most: those that some new token sees; in names of the host code."""
    return _N_MAX if mask.left is None else sympy.Min(_N_MAX, _N_NEW + mask.left)
