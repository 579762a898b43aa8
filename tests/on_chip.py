"""Plans whose forward pass mixes heads on the chip or in strips, as a table says."""

from __future__ import annotations

from mtagen import Plan, Spec, plan
from mtagen.planner import Backend
from mtagen.planner.heads.passes import key
from mtagen.planner.tables import SHIPPED, Table


def mixed_on_chip(spec: Spec, target: str = "sm_90a", backend: Backend = "cuda") -> Plan:
    """The plan of a spec, with the lowering "heads" in the forward pass if it has a plan."""
    return _planned("heads", spec, target, backend)


def mixed_in_strips(spec: Spec, target: str = "sm_90a", backend: Backend = "cuda") -> Plan:
    """The plan of a spec without the lowering "heads"."""
    return _planned("strip", spec, target, backend)


def _planned(lowering: str, spec: Spec, target: str, backend: Backend) -> Plan:
    return plan(spec, target, backend, tables=(Table(SHIPPED, {key(spec): {"lowering": lowering}}),))
