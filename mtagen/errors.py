"""Exceptions of mtagen.

Every message says what was passed, the rule that it breaks, and what is legal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST = 200  # a message shows this many characters of a value


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
    """Return an error message: the argument, the value passed, the rule, the legal values."""
    text = re.sub(r"\s*\n\s*", " ", repr(got))  # arrays and tensors print several lines
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{name}: got {text}; {rule}; legal: {legal}"


def check_choice(name: str, got: object, legal: Sequence[str], rule: str = "is not supported") -> None:
    """Check that ``got``, of any type (arrays too), is one of the strings ``legal``.

    Raises:
        SpecError: it is not.
    """
    if not (isinstance(got, str) and got in legal):
        raise SpecError(explain(name, got, rule, legal))
