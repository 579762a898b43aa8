"""Symbols for the sizes in grids and shapes; host code has them under the same names."""

from __future__ import annotations

import sympy

BATCH, HEADS, KV_HEADS = sympy.symbols("batch heads kv_heads", integer=True, positive=True)
N_HEADS = sympy.Symbol("n_heads", integer=True, positive=True)  # of all heads, where a launch takes only some
GROUP = sympy.Symbol("group", integer=True, positive=True)  # heads of queries for each head of keys
TOGETHER = sympy.Symbol("together", integer=True, positive=True)  # heads of a section of a grid
TOTAL_Q, TOTAL_K = sympy.symbols("total_q total_k", integer=True, nonnegative=True)  # rows of all packed documents
DOCUMENTS = sympy.Symbol("documents", integer=True, nonnegative=True)

# ---- A decode step: new tokens, the keys of the cache, and the parts into which they are split

N_NEW, N_MAX, SPLITS = sympy.symbols("n_new n_max splits", integer=True, positive=True)

# ---- A strip: its slots, rows and keys; its sequences are B0 <= b < B1

SLOTS, COUNT, KEYS = sympy.symbols("slots count keys", integer=True, positive=True)
HEAD_PARTS = sympy.Symbol("head_parts", integer=True, positive=True)  # into which heads that share a key are divided
B0, B1 = sympy.symbols("b0 b1", integer=True, nonnegative=True)
