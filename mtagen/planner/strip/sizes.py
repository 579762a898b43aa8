"""Symbols in the grids of strip kernels; host code has them under the same names
(``strip_batch_host.j2``).
"""

from __future__ import annotations

import sympy

SLOTS, COUNT, KEYS, N_HEADS = sympy.symbols("slots count keys n_heads", integer=True, positive=True)
N_NEW, SPLITS = sympy.symbols("n_new splits", integer=True, positive=True)
B0, B1 = sympy.symbols("b0 b1", integer=True, nonnegative=True)
