"""A failing case made smaller, field by field, as long as it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import lcm
from typing import Any

from .case import Case

# The plainest values of fields, which stages are dropped by, too.
PLAIN: dict[str, Any] = {
    "kernel": None,
    "post_kernel": None,
    "mixed_heads": None,
    "post_mixed_heads": None,
    "dropout_p": 0.0,
    "hidden": "",
    "return_lse": False,
    "spare": (0, 0),
    "scale": None,
    "size": 1.0,
    "window": (-1, -1),
    "causal": True,
    "mask": "source",
    "key_padding": "both",
    "layouts": ("contiguous",) * 4,
    "strided_lengths": False,
    "cast_weights": False,
    "splits": None,
    "small": False,
    "kv_heads": 1,
    "head_dim": 16,
    "value_head_dim": 16,
    "earlier": False,
    "data": 0,
}


def shrink(case: Case, kinds: Callable[[Case], set[str]], seconds: float) -> Case:
    """The smallest case that a greedy search finds in this time, of those that fail as this one does.

    Args:
        case: a failing case.
        kinds: the ways in which a case fails. A smaller one has one of them, too: else it would show another fault.
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
    """Cases that differ from this one by a step towards the plainest."""
    for name, value in PLAIN.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    fewest = lcm(case.mixed_heads or 1, case.post_mixed_heads or 1)
    if case.heads > fewest:
        yield replace(case, heads=fewest, kv_heads=1)
    for i in range(len(case.lengths)) if len(case.lengths) > 1 else ():
        yield replace(case, lengths=case.lengths[:i] + case.lengths[i + 1 :])
    for axis in (0, 1):
        for less in (lambda n: n // 2, lambda n: n - 1):
            yield from _shorter(case, axis, less)
    for name in ("kernel", "post_kernel", "window", "spare"):
        pair = getattr(case, name)
        for i in (0, 1) if pair else ():
            least = {"window": -1, "spare": 0}.get(name, 1)
            for value in (least, pair[i] // 2, pair[i] - 1):
                if least <= value < pair[i]:
                    yield replace(case, **{name: (value, pair[1]) if i == 0 else (pair[0], value)})
    for i, layout in enumerate(case.layouts):
        if layout != "contiguous":
            yield replace(case, layouts=(*case.layouts[:i], "contiguous", *case.layouts[i + 1 :]))


def _shorter(case: Case, axis: int, less: Callable[[int], int]) -> Iterator[Case]:
    """Shorter sequences: each of documents by itself, all of a batch alike, and of decode's the new tokens alike."""
    together = case.call == "batch" or (case.call == "decode" and axis == 0)
    least = 1 if case.call == "decode" and axis == 0 else 0
    for i in range(1 if together else len(case.lengths)):
        lengths = [[*pair] for pair in case.lengths]
        for pair in lengths if together else lengths[i : i + 1]:
            pair[axis] = max(least, less(pair[axis]))
        made = tuple((n_q, n_k) for n_q, n_k in lengths)
        if made != case.lengths:
            yield replace(case, lengths=made)
