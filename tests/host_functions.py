"""Generated modules, whose host functions tests call without the op that stands on top of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from mtagen.codegen import render
from mtagen.planner import plan
from mtagen.planner.lift.tiling import Tile
from mtagen.runtime.load import load_host
from mtagen.spec import Spec


def lift_module(spec: Spec, target: str, tile: Tile | None = None, workspace_bytes: int | None = None) -> ModuleType:
    """The module of the lowering "lift"; with a tile for its products, and a workspace, where they are given."""
    planned = plan(spec, target, "triton")
    for one in planned.lift.values():
        products = ("forward", "scores", "dq_", "dk_")
        tiles = tuple((role, tile if tile and role.startswith(products) else own) for role, own in one.tiles)
        workspace = one.workspace_bytes if workspace_bytes is None else workspace_bytes
        planned = planned.replaced(replace(one, tiles=tiles, workspace_bytes=workspace))
    return load_host(planned, render(planned), "forward")


def with_small_tiles(spec: Spec, target: str) -> dict[str, Callable[..., Any]]:
    """The host functions of a spec's passes, with small tiles and the shortest strips: small problems have many."""
    module = lift_module(spec, target, Tile(16, 32), workspace_bytes=2**10)
    return {"forward": module.forward, "backward": module.backward}
