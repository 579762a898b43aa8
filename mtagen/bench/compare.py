"""Comparison of two runs: the measurements that became slower."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ..errors import InputError, explain
from ..measure.cases import Case
from .names import is_ours
from .runs import Run, device, measurements

THRESHOLD = 0.07  # two runs of the same code differ by less


class Pair(NamedTuple):
    """The same case and contender, measured in two runs."""

    case: Case
    contender: str
    before_ms: float
    ms: float

    @property
    def ratio(self) -> float:
        """The new time over the time before."""
        return self.ms / self.before_ms


def check_device(here: str, before: Run) -> None:
    """Refuse to compare measurements made ``here`` with a run on another device.

    Raises:
        InputError: the run is from another device.
    """
    if here != device(before):
        rule = "was measured on another device, so its times cannot be compared with this run's"
        raise InputError(explain("against", device(before), rule, here))


def check_shared(cases: Iterable[Case], names: Collection[str], before: Run) -> None:
    """Refuse to compare a run to be made of ``cases`` by the contenders ``names`` with one that has none of them.

    Raises:
        InputError: nothing of mtagen is in both.
    """
    earlier = measurements(before)
    if not any(is_ours(name) and name in earlier.get(case, {}) for case in cases for name in names):
        raise _nothing_shared(before)


def pairs(run: Run, before: Run) -> list[Pair]:
    """Return the pairs of measurements of mtagen's contenders that both runs have.

    Raises:
        InputError: the runs are of different devices or have no measurement of mtagen in common.
    """
    check_device(device(run), before)
    earlier = measurements(before)
    found = [
        Pair(case, name, earlier[case][name]["ms"], row["ms"])
        for case, rows in measurements(run).items()
        for name, row in rows.items()
        if is_ours(name) and name in earlier.get(case, {})
    ]
    if not found:
        raise _nothing_shared(before)
    return found


def slower(found: Iterable[Pair], threshold: float = THRESHOLD) -> list[Pair]:
    """Return the pairs whose time has grown by more than a factor ``1 + threshold``, the worst
    first.
    """
    return sorted((pair for pair in found if pair.ms > (1 + threshold) * pair.before_ms), key=lambda pair: -pair.ratio)


def _nothing_shared(before: Run) -> InputError:
    rule = "has no measurement of mtagen in common with this run"
    return InputError(explain("against", before["command"], rule, "a run with some of the same cases"))
