"""Plans that mix heads on the chip, as a table says."""

from __future__ import annotations

from mtagen import Plan, Spec, plan
from mtagen.planner.heads.passes import key
from mtagen.planner.tables import SHIPPED, Table


def mixed_on_chip(spec: Spec, target: str = "sm_90a", backend: str = "cuda") -> Plan:
    """The plan of a spec, with the lowering "heads" in the forward pass if it has a plan."""
    return plan(spec, target, backend, tables=(Table(SHIPPED, {key(spec): {"lowering": "heads"}}),))  # type: ignore[arg-type]
