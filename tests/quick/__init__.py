"""The quick tier: tests that touch every module and every template of mtagen in 90 seconds of two idle cores.

``python -m pytest -m quick -n 2`` runs them; ``python -m tests.quick`` also checks that they touch everything.
"""

from __future__ import annotations

# Files below tests/, functions in them, or single cases of functions, as pytest names them.
QUICK = frozenset(
    {
        "test_accuracy.py",
        "test_mask.py",
        "test_cpu.py",
        "test_measure.py",
    }
)
FILES = frozenset(name.partition("::")[0] for name in QUICK)


def is_quick(name: str) -> bool:
    """Whether a test belongs to the quick tier, by its name below tests/."""
    function = name.partition("[")[0]
    file = function.partition("::")[0]
    return not QUICK.isdisjoint((file, function, name))
