"""Plan -> loaded kernels: render, keep in the cache, import, compile."""

from __future__ import annotations

from types import ModuleType

import torch
import triton

from ..codegen import render
from ..planner.plan import Plan
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
    spec = plan.spec
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[spec.dtype]
    q = torch.zeros(1, 1, spec.cq, spec.head_dim, dtype=dtype, device=device)
    v = torch.zeros(1, 1, spec.cq, spec.value_head_dim, dtype=dtype, device=device)
    weight = torch.zeros(1, spec.cq, spec.ck, device=device)
    out, lse = module.forward(q, q, v, weight, 1.0)
    module.backward(out, lse, q, q, v, weight, out, lse, 1.0)
    for lengths in (None, torch.ones(1, dtype=torch.int32, device=device)):
        module.decode(q, q, v, weight, 1.0, lengths, None)
    torch.cuda.synchronize(device)
