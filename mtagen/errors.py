"""Errors: every message says what was got, the rule it breaks, and what is legal."""

from __future__ import annotations


class MtagenError(Exception):
    """Base class of all errors raised by mtagen."""


class SpecError(MtagenError, ValueError):
    """The request itself is not legal (kernel shape, head dim, option values)."""


class InputError(MtagenError, ValueError):
    """A tensor or argument passed to a built op does not fit it."""


class PlanError(MtagenError, ValueError):
    """No legal plan exists for this request on this target."""


class BackendError(MtagenError, RuntimeError):
    """The chosen backend cannot be used here."""


def explain(name: str, got: object, rule: str, legal: object) -> str:
    """One line for an error message: the argument, the value got, the rule broken, the legal values."""
    return f"{name}: got {got!r}; {rule}; legal: {legal}"
