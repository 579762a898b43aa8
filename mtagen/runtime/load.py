"""Plan -> loaded kernels: render, keep in the cache, import, compile."""

from __future__ import annotations

from types import ModuleType

import torch
import triton

from ..codegen import render
from ..dtypes import TORCH_DTYPES
from ..planner.plan import Plan
from ..spec import MAX_NEW_TOKENS
from .cache import Cache, cache_key
from .loader import load_module

_FILE = "kernels.py"


def plan_key(plan: Plan) -> str:
    """Content hash of a plan and its source: the identity of a built op and of its cache entry."""
    source = render(plan) if plan.backend == "triton" else ""
    return cache_key(source, plan.to_dict(), torch.__version__, triton.__version__)


def load(plan: Plan) -> ModuleType:
    """The plan's module, from the cache or rendered anew. Nothing is compiled yet."""
    source = render(plan).encode()
    entry = Cache().get_or_build(
        plan.name, plan.target, plan_key(plan), lambda: {_FILE: source}, metadata={"plan": plan.to_dict()}
    )
    return load_module(entry.path / _FILE, entry.files[_FILE])


def compile_kernels(plan: Plan, module: ModuleType, device: torch.device) -> None:
    """Compile every kernel of ``module`` for ``device`` by one small call of each pass.

    Lengths, strides and head counts are run-time arguments, so nothing is left to compile in a later call.
    """
    exercise(plan, module, device)
    torch.cuda.synchronize(device)


def exercise(plan: Plan, module: ModuleType, device: torch.device) -> None:
    """Call forward, backward and decode such that every kernel of ``module`` is launched."""
    spec = plan.spec

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype], device=device)

    k, v = zeros(1, 2, spec.cq, spec.head_dim), zeros(1, 2, spec.cq, spec.value_head_dim)
    weight = torch.zeros(2, spec.cq, spec.ck, device=device)
    out, lse = module.forward(k, k, v, weight, 1.0)
    module.backward(out, lse, k, k, v, weight, out, lse, 1.0)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    for new_tokens in (1, MAX_NEW_TOKENS):
        q_tail = zeros(1, 2, spec.cq - 1 + new_tokens, spec.head_dim)
        for cache_seqlens in (None, lengths):
            module.decode(q_tail, k, v, weight, 1.0, cache_seqlens, None)
