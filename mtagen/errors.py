"""Errors: every message says what was got, the rule it breaks, and what is legal."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST = 200  # characters of a value that a message shows


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
    text = re.sub(r"\s*\n\s*", " ", repr(got))  # arrays and tensors print several lines
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{name}: got {text}; {rule}; legal: {legal}"


def check_choice(name: str, got: object, legal: Sequence[str], rule: str = "is not supported") -> None:
    """Check that ``got`` is one of the strings ``legal``, whatever its type: an array has no truth value to ask.

    Raises:
        SpecError: it is not.
    """
    if not (isinstance(got, str) and got in legal):
        raise SpecError(explain(name, got, rule, legal))
