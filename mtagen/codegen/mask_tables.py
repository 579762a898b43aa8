"""Render a module that computes the tables of a mask: one Python file with Triton kernels and host functions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..planner.geometry.limits import Limits
from ..planner.geometry.score import Entry
from ..planner.passes import passes_of
from ..spec import Spec
from ..version import __version__
from . import host, triton
from .expressions import triton_view, triton_wide

BLOCK = 128  # rows of a program, and of a block whose extremes are kept
KEYS_OF_PROGRAM = 32  # a program compares each of them with BLOCK numbers at once


def render(spec: Spec) -> tuple[str, str]:
    """Return the name and the text of the module. Importing it needs torch and triton.

    It depends on the mask, and not on the stages or dtypes of the op, except that fused backward passes own keys.
    """
    text = triton.rendered("mask_tables.py.j2", _context(spec))
    return f"mta_mask_{hashlib.sha256(text.encode()).hexdigest()[:8]}", text


def _context(spec: Spec) -> Mapping[str, Any]:
    """Return the names that the template uses."""
    limits = Limits.of(spec)
    of_bounds = {entry.args[0].name for bound in (*limits.firsts, *limits.lasts) for entry in bound.atoms(Entry)}
    tables = {name: [table.name for table in spec.tables(name)] for name in passes_of(spec)}
    return {
        "version": __version__,
        "spec": spec,
        "limits": limits,
        "parameters": [view.argument for view in limits.views],
        # Names and addresses, and whether more than gaps read them
        "views": [
            (view.symbol.name, triton_view(view, spec.packed, "tokens"), view.symbol.name in of_bounds)
            for view in limits.views
        ],
        "has_entries": any(view.has_entries for view in limits.views),
        "reads_tokens": any(view.token_axes or view.parameter.blocks for view in limits.views),
        "tables": tables,
        "wide": triton_wide,
        "jit": _jit,
        "filled": _filled,
        "BLOCK": BLOCK,
        "KEYS": KEYS_OF_PROGRAM,
        "MOST": 2**31 - 1,
    }


def _jit(numbers: Sequence[str], unaligned: Sequence[str]) -> str:
    """Return the decorator of a kernel, which is compiled once for all numbers and addresses of what it reads."""
    options = [f"do_not_specialize=[{_quoted(numbers)}]"]
    options += [f"do_not_specialize_on_alignment=[{_quoted(unaligned)}]"] if unaligned else []
    return "\n".join(["@triton.jit(", *host.filled(options, 4), ")"])


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _filled(names: Sequence[str], indent: int = 4) -> str:
    """Return names as lines of a call or of a function's head."""
    return "\n".join(host.filled(names, indent))
