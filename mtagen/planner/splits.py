"""Split the keys into parts that CTAs process in parallel, where rows and heads alone do not fill
the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from .geometry.mask import Mask
from .sizes import N_MAX, N_NEW

_MIN_TILES = 4  # a shorter split spends most of its time on its prologue
_MAX_WAVES = 4


@dataclass(frozen=True)
class SplitRule:
    """The numbers from which ``templates/host/splits.py`` chooses the number of splits at run time.

    Attributes:
        slots: number of CTAs that are resident on the target at once.
        min_keys: lower limit of a split's keys.
        max_waves: upper limit of waves of ``slots`` CTAs that splitting may make.
    """

    slots: int
    min_keys: int
    max_waves: int


def split_rule(resident: int, block_n: int, multiprocessors: int, max_waves: int = _MAX_WAVES) -> SplitRule:
    """Return the rule for a kernel with ``resident`` CTAs per multiprocessor."""
    return SplitRule(resident * multiprocessors, _MIN_TILES * block_n, max_waves)


def split_keys(mask: Mask) -> Expr:
    """Return the upper limit of a cache's keys that are split: those that any new token sees.

    The expression uses the names of host code.
    """
    return N_MAX if mask.left is None else sympy.Min(N_MAX, N_NEW + mask.left)
