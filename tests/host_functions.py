"""Generated modules, whose host functions tests call without the op that stands on top of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from mtagen.codegen import render
from mtagen.planner import Plan, plan
from mtagen.planner.lift.tiling import Tile
from mtagen.runtime.load import load_host
from mtagen.spec import Spec


def lift_module(spec: Spec, target: str, tile: Tile | None = None, workspace_bytes: int | None = None) -> ModuleType:
    """The module of the lowering "lift"; with a tile for its products, and a workspace, where they are given."""
    planned = retiled(plan(spec, target, "triton"), tile, workspace_bytes)
    return load_host(planned, render(planned), "forward")


def retiled(planned: Plan, tile: Tile | None = None, workspace_bytes: int | None = None) -> Plan:
    """A plan with this tile for products of "lift", and this workspace for the passes that have one, where given."""
    for one in (*planned.lift.values(), *planned.strip.values()):
        workspace = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
        if tile and one.lowering == "lift":
            products = ("forward", "scores", "dq_", "dk_")
            tiles = tuple((role, tile if role.startswith(products) else own) for role, own in one.tiles)
            workspace |= {"tiles": tiles}
        planned = planned.replaced(replace(one, **workspace))
    return planned


def with_small_tiles(spec: Spec, target: str) -> dict[str, Callable[..., Any]]:
    """The host functions of a spec's passes, with small tiles and the shortest strips: small problems have many."""
    module = lift_module(spec, target, Tile(16, 32), workspace_bytes=2**10)
    return {"forward": module.forward, "backward": module.backward}
