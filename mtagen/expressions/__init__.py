"""Score expressions: functions of a score before the softmax.

The option ``logits`` of :func:`mtagen.build` takes an expression in the score. An expression is a
text, or a function that mtagen calls once with symbols::

    mtagen.build(None, 64, logits="50 * tanh(s / 50)")
    mtagen.build(None, 64, logits=lambda s, i, j: s - 0.1 * (i - j))

| name | meaning |
|---|---|
| ``s`` | the score: scaled, and after the convolution and the mixture |
| ``i`` | the position of the query: its key, counted from the sequence's first key, is the same number |
| ``j`` | the key, counted from the sequence's first |
| ``h`` | the head of the queries |

Expressions are made of numbers, these names, ``+ - * / // % **`` with whole exponents, the
functions ``tanh``, ``exp``, ``log``, ``sqrt``, ``abs``, ``min``, ``max`` and ``floor``, and
``where(condition, x, y)``. A condition compares numbers; ``&``, ``|`` and ``~`` join conditions. A
text is parsed, never evaluated. mtagen derives the gradient by sympy. ``floor``, ``//`` and ``%``
are for parts without ``s``, because they have no gradient.

Expressions are computed in fp32, or in fp64 for fp64 inputs. Scores that the query does not see
stay hidden, whatever the expression is there.

The functions of this module return texts of common expressions.
"""

from __future__ import annotations

import math
from numbers import Real

from ..errors import SpecError, explain
from .language import canonical

__all__ = ["alibi", "canonical", "softcap"]


def softcap(cap: float) -> str:
    """Return logits that tend to plus and minus ``cap``: ``cap * tanh(s / cap)``, as in Gemma 2.

    Raises:
        SpecError: ``cap`` is not positive and finite.
    """
    if isinstance(cap, bool) or not isinstance(cap, Real) or not 0 < cap < math.inf:
        raise SpecError(explain("cap", cap, "must be positive and finite", "such as 50.0"))
    return f"{float(cap)!r} * tanh(s / {float(cap)!r})"


def alibi(heads: int) -> str:
    """Return logits that fall with the distance of the key, by ALiBi's slope of each head.

    The slope of head h of H is ``2 ** (-8 (h + 1) / H)`` (Press et al., 2022, for powers of two).

    Args:
        heads: H, heads of queries.

    Raises:
        SpecError: ``heads`` is not a positive integer.
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise SpecError(explain("heads", heads, "must be a number of heads", ">= 1"))
    return f"s - exp(-8 * log(2) * (h + 1) / {heads}) * (i - j)"
