"""Make a failing case smaller, field by field, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import lcm

from .case import Case

_ELSEWHERE = ("backend", "maker", "dtype", "call", "heads", "lengths", "cut")  # kept, or shrunk by steps of their own
PLAIN = {field.name: field.default for field in fields(Case) if field.name not in _ELSEWHERE}
LEAST = {"kernel": 1, "post_kernel": 1, "window": -1, "spare": 0}  # of the elements of pairs


def shrink(case: Case, kinds: Callable[[Case], set[str]], seconds: float) -> Case:
    """Return the smallest failing case that a greedy search finds.

    Args:
        case: a failing case.
        kinds: returns the ways in which a case fails. A smaller case must share one of them: else it would show another
            fault.
        seconds: how long to search.
    """
    end, tried, wanted = time.monotonic() + seconds, {case}, kinds(case)
    while True:
        for smaller in simpler(case):
            if time.monotonic() > end:
                return case
            if smaller not in tried:
                tried.add(smaller)
                if kinds(smaller) & wanted:
                    case = smaller
                    break
        else:
            return case


def simpler(case: Case) -> Iterator[Case]:
    """Yield the cases that are one step plainer: stages are dropped first, then sizes shrink."""
    for name, value in PLAIN.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    fewest = lcm(case.mixed_heads or 1, case.post_mixed_heads or 1)
    if case.heads > fewest:
        yield replace(case, heads=fewest, kv_heads=1)
    for i in range(len(case.lengths)) if len(case.lengths) > 1 else ():
        yield replace(case, lengths=case.lengths[:i] + case.lengths[i + 1 :])
    for axis in (0, 1):
        yield from _shorter(case, axis)
    for name, least in LEAST.items():
        pair = getattr(case, name)
        for i in (0, 1) if pair else ():
            for value in (least, pair[i] // 2, pair[i] - 1):
                if least <= value < pair[i]:
                    yield replace(case, **{name: (value, pair[1]) if i == 0 else (pair[0], value)})
    for i, layout in enumerate(case.layouts):
        if layout != "contiguous":
            yield replace(case, layouts=(*case.layouts[:i], "contiguous", *case.layouts[i + 1 :]))


def _shorter(case: Case, axis: int) -> Iterator[Case]:
    """Yield cases with shorter sequences; those that must be as long as each other stay so."""
    together = case.call == "batch" or (case.call == "decode" and axis == 0)
    least = 1 if case.call == "decode" and axis == 0 else 0
    for i in range(1 if together else len(case.lengths)):
        n = case.lengths[i][axis]
        for value in {n // 2, n - 1} if n > least else ():
            pairs = [[*pair] for pair in case.lengths]
            for pair in pairs if together else pairs[i : i + 1]:
                pair[axis] = max(least, value)
            yield replace(case, lengths=tuple((n_q, n_k) for n_q, n_k in pairs))
