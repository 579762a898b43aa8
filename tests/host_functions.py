"""Host functions of generated modules, called without the op that stands on top of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mtagen.codegen import render
from mtagen.planner import Plan, plan
from mtagen.planner.lift.tiling import Tile
from mtagen.runtime.load import load_triton
from mtagen.spec import Spec


def lift_module(spec: Spec, target: str, tile: Tile | None = None, workspace_bytes: int | None = None) -> ModuleType:
    """The module of the lowering "lift"; with a tile for its products, and a workspace, where they are given."""
    planned = plan(spec, target, "triton")
    for one in planned.lift.values():
        products = ("forward", "scores", "dq_", "dk_")
        tiles = tuple((role, tile if tile and role.startswith(products) else own) for role, own in one.tiles)
        workspace = one.workspace_bytes if workspace_bytes is None else workspace_bytes
        planned = planned.replaced(replace(one, tiles=tiles, workspace_bytes=workspace))
    return module_of(planned)


def module_of(planned: Plan) -> ModuleType:
    """The module of Triton kernels of a plan."""
    return load_triton(planned, render(planned))


def differentiable(module: ModuleType, *options: Any, scale: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, weight) -> (out, lse) of a module, whose backward pass makes their gradients.

    Args:
        module: has the host functions ``forward`` and ``backward``.
        options: what these take after the scale.
        scale: factor of q k^T.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = module.forward(*inputs, scale, *options)
            ctx.save_for_backward(*inputs, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
            gradients: tuple[Tensor, ...] = module.backward(
                grad_out, grad_lse.contiguous(), *ctx.saved_tensors, scale, *options
            )
            return gradients

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = Function.apply(q, k, v, weight)
        return out, lse

    return run
