"""Score expressions: functions of scores, tensors that they read, and sinks.

The options ``scores``, ``convolved`` and ``logits`` of :func:`mtagen.build` take an expression in the
score. An expression is a text, or a function that mtagen calls once with symbols::

    mtagen.build(None, 64, logits="50 * tanh(s / 50)")
    mtagen.build(None, 64, logits=lambda s, i, j: s - 0.1 * (i - j))

| name | meaning |
|---|---|
| ``s`` | the score: scaled; after the convolution in ``convolved``, after the mixing in ``logits`` |
| ``i`` | the position of the query: its key, counted from the sequence's first key, is the same number |
| ``j`` | the key, counted from the sequence's first |
| ``h`` | the head of the queries |
| a parameter | an entry of a tensor that each call passes, such as ``table[h, min(64, i - j)]`` |

Expressions are made of numbers, these names, ``+ - * / // % **`` with whole exponents, the
functions ``tanh``, ``exp``, ``log``, ``sqrt``, ``abs``, ``min``, ``max`` and ``floor``, and
``where(condition, x, y)``. A condition compares numbers; ``&``, ``|`` and ``~`` join conditions. A
text is parsed, never evaluated. mtagen derives the gradient by sympy. ``floor``, ``//`` and ``%``
are for parts without ``s``, because they have no gradient.

The option ``parameters`` names the tensors and their axes: ``{"slopes": "h", "table": "h,65"}``. An
axis ``b`` counts batch entries (or documents), ``h`` heads of queries, ``i`` and ``j`` tokens of the
sequence; a number is the length of a table. Axes b, h, i and j are indexed by these names, tables by
any integer of places that mtagen can prove to be in the table. A tensor that requires a gradient
gets one, which is bit-reproducible.

Expressions are computed in fp32, or in fp64 for fp64 inputs. Scores that the query does not see
stay hidden, whatever the expression is there.

The functions of this module return texts of common expressions.
"""

from __future__ import annotations

import math
from numbers import Real

from ..errors import SpecError, explain
from .given import canonical

__all__ = ["alibi", "canonical", "clipped", "forget", "softcap", "t5", "temperature"]


def softcap(cap: float) -> str:
    """Return logits that tend to plus and minus ``cap``: ``cap * tanh(s / cap)``, as in Gemma 2.

    Raises:
        SpecError: ``cap`` is not positive and finite.
    """
    if isinstance(cap, bool) or not isinstance(cap, Real) or not 0 < cap < math.inf:
        raise SpecError(explain("cap", cap, "must be positive and finite", "such as 50.0"))
    return f"{float(cap)!r} * tanh(s / {float(cap)!r})"


def alibi(heads: int) -> str:
    """Return logits that fall with the distance of the key, by ALiBi's slope of each head, for causal attention.

    The slope of head h of H is ``2 ** (-8 (h + 1) / H)`` (Press et al., 2022, for powers of two). It is
    added to ``j - i``, so queries that see later keys would prefer them: then replace ``(i - j)`` by ``abs(i - j)``.

    Args:
        heads: H, the heads of queries of each call. With other heads the slopes are those of H.

    Raises:
        SpecError: ``heads`` is not a positive integer.
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise SpecError(explain("heads", heads, "must be a number of heads", ">= 1"))
    return f"s - exp(-8 * log(2) * (h + 1) / {heads}) * (i - j)"


def clipped(window: int, table: str = "table") -> str:
    """Return logits with a learned bias for each distance up to ``window``, and the last one beyond.

    The op needs ``parameters={"table": f"h,{window + 1}"}``: an entry for each head and distance
    (Shaw et al., 2018, as a bias).

    Args:
        window: the largest distance with an entry of its own.
        table: the name of the parameter.

    Raises:
        SpecError: ``window`` is not a positive integer.
    """
    return f"s + {table}[h, max(0, min({_count('window', window)}, i - j))]"


def t5(buckets: int = 32, distance: int = 128, table: str = "table") -> str:
    """Return logits with T5's learned bias of causal attention: one entry for a range of distances.

    The first half of the buckets has a distance each, the others ranges that grow like a logarithm
    up to ``distance`` (Raffel et al., 2020). The op needs ``parameters={"table": f"h,{buckets}"}``.

    Args:
        buckets: entries of a head, an even number.
        distance: from this distance on, all have the last entry.
        table: the name of the parameter.

    Raises:
        SpecError: ``buckets`` is no even number, or ``distance`` is not more than half of it.
    """
    half = _count("buckets", buckets) // 2
    if buckets % 2:
        raise SpecError(explain("buckets", buckets, "must be even", "such as 32"))
    if _count("distance", distance) <= half:
        raise SpecError(explain("distance", distance, f"must be more than buckets / 2 = {half}", "such as 128"))
    grown = f"log(max({half}, i - j) / {half}) * {half} / log({distance} / {half})"
    few = f"max(0, min({half - 1}, i - j))"
    bucket = f"where(i - j < {half}, {few}, min({buckets - 1}, {half} + floor({grown})))"
    return f"s + {table}[h, {bucket}]"


def forget(gates: str = "gates") -> str:
    """Return logits of forgetting attention: the sum of log gates between the key and the query is added.

    The op needs ``parameters={"gates": "b,h,j"}``: the running sum of the log gates of each token,
    ``F.logsigmoid(x).cumsum(-1)`` (Lin et al., 2025).

    Args:
        gates: the name of the parameter.
    """
    return f"s + {gates}[b, h, i] - {gates}[b, h, j]"


def temperature(factors: str = "factors") -> str:
    """Return logits that are multiplied by a learned factor of each head.

    The op needs ``parameters={"factors": "h"}``.

    Args:
        factors: the name of the parameter.
    """
    return f"s * {factors}[h]"


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(explain(name, value, "must be a positive integer", "1, 2, ..."))
    return value
