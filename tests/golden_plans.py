"""The plans that ``auto`` chooses, as a table: ``golden_plans.txt`` beside this file holds it as it was last agreed on.

Regenerate it after a change that is meant to choose otherwise, and read the difference before it is committed::

    python -m tests.golden_plans

A line is the plan of one pass: the spec, the pass and the targets that share the plan; then the backend, the lowering,
each decision, and the roles of the kernels, which their names begin with. The specs are chosen so that most candidates
that are first choice anywhere are first choice in a line: 7 of 8 in a sweep of 136 specs over all targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

from mtagen import TARGETS, PlanError, Spec, plan
from mtagen.planner.choice import PlannedPass
from mtagen.planner.names import suffix
from mtagen.planner.passes import passes_of

FILE = Path(__file__).with_suffix(".txt")
COMMAND = "python -m tests.golden_plans"

_AUTHORS = Spec((6, 11), 64)
SPECS = (
    *(Spec(None, d) for d in (64, 80, 144, 256)),
    Spec(None, 64, dtype="fp32"),
    Spec((3, 3), 96),
    Spec((3, 3), 192, 128),
    *(Spec((6, 11), d) for d in (16, 64, 128, 256)),
    *(Spec((6, 11), d, dtype="fp32") for d in (128, 256)),
    *(Spec((9, 2), d) for d in (64, 176)),
    Spec((3, 18), 80),
    Spec((16, 17), 24),
    Spec((11, 11), 256),
    Spec((6, 11), 64, 128, dtype="fp16"),
    replace(_AUTHORS, mask="output", key_padding="left"),
    replace(_AUTHORS, window=(127, -1)),
    replace(_AUTHORS, packed=True),
    replace(_AUTHORS, dropout=True),
    replace(_AUTHORS, scores="3 * tanh(s / 3)"),
    replace(_AUTHORS, scores="s - (i - j) / 8"),
    Spec(None, 64, mixed_heads=16, post_mixed_heads=16),
    Spec(None, 128, post_mixed_heads=2),
    Spec((6, 11), 64, post_mixed_heads=2),
    Spec((3, 5), 128, 64, mixed_heads=2),
    Spec((6, 11), 64, mixed_heads=2, post_kernel=(3, 3)),
    Spec((6, 11), 64, mixed_heads=2, post_kernel=(6, 11), post_mixed_heads=2),
    Spec((6, 11), 128, mixed_heads=16, packed=True, dropout=True),
)


def main() -> None:
    FILE.write_text(table(), encoding="utf-8")


def table() -> str:
    """Every pass of every spec on every target, sorted by spec, pass and target."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for spec in sorted(SPECS, key=_name):
        for target in TARGETS:
            for pass_name, decided in _passes(spec, target):
                shared.setdefault((_name(spec), pass_name, decided), []).append(target)
    lines = sorted(shared.items(), key=lambda line: line[0][:2])  # which leaves the order of targets
    return "".join(
        f"{name} {pass_name} {' '.join(targets)}: {decided}\n" for (name, pass_name, decided), targets in lines
    )


def difference(agreed: str, chosen: str) -> str:
    """A unified diff of two tables, and how to agree to the second one; empty if they are equal."""
    if agreed == chosen:
        return ""
    lines = unified_diff(agreed.splitlines(), chosen.splitlines(), FILE.name, "chosen now", lineterm="", n=0)
    return "\n".join(["Other plans are chosen.", *lines, f"If that is meant: {COMMAND}"])


def _name(spec: Spec) -> str:
    return suffix(spec, "").removesuffix("_")


def _passes(spec: Spec, target: str) -> list[tuple[str, str]]:
    """What was decided about each pass, or why there is no plan."""
    try:
        return [(one.plan.pass_name, _decided(one)) for one in plan(spec, target).passes]
    except PlanError as refusal:
        return [(pass_name, f"none, {str(refusal).partition(';')[0]}") for pass_name in passes_of(spec)]


def _decided(one: PlannedPass) -> str:
    decisions = [f"{key.split()[1]}({_fields(fields)})" for key, fields in one.plan.decisions().items()]
    roles = " ".join(kernel.role for kernel in one.plan.kernels)
    return "; ".join((f"{one.backend} {one.plan.lowering}", *decisions, roles))


def _fields(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(f"[{_fields(one)}]" for one in value)
    return str(value)


if __name__ == "__main__":
    main()
