"""Plan -> callable passes: render, keep in the cache, compile, load."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..codegen import sources
from ..codegen.triton import render
from ..dtypes import TORCH_DTYPES
from ..planner.backends import GENERATED
from ..planner.plan import Plan
from ..spec import MAX_NEW_TOKENS
from .cache import Cache, cache_key
from .cuda import compile_pass, cuda_is_installed, cuda_pass
from .loader import load_module
from .triton import require_triton, triton_is_installed, triton_version

_FILE = "kernels.py"


@dataclass(frozen=True)
class Passes:
    """The host functions of a plan, whatever backend computes each.

    Attributes:
        forward: (q, k, v, weight, scale) -> (out, lse).
        backward: (grad_out, grad_lse, q, k, v, weight, out, lse, scale, deterministic=bool) -> (dq, dk, dv, dweight).
        decode: (q_tail, k_cache, v_cache, weight, scale, cache_seqlens, num_splits) -> (out, lse).
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    decode: Callable[..., tuple[Tensor, Tensor]]


def available_backends() -> tuple[str, ...]:
    """The backends of generated kernels whose packages are installed."""
    installed = {"cuda": cuda_is_installed(), "triton": triton_is_installed()}
    return tuple(backend for backend in GENERATED if installed[backend])


def plan_key(plan: Plan) -> str:
    """Content hash of a plan, its sources and the packages that run them: an op's identity, and its cache entry's."""
    made = {} if plan.backend == "torch" else sources(plan)
    return cache_key(made, plan.to_dict(), torch.__version__, triton_version() if plan.tiles else None)


def load(plan: Plan) -> Passes:
    """The passes of a plan of generated kernels. Nothing is compiled yet: see :func:`compile_kernels`.

    Raises:
        BackendError: Triton serves a pass, and the triton package is missing.
    """
    functions: dict[str, Callable[..., Any]] = {name: cuda_pass(name, fused) for name, fused in plan.fused.items()}
    if served := plan.served_by("triton"):
        module = load_triton(plan)
        functions |= {name: getattr(module, name) for name in served}
        if "backward" in served:
            functions["backward"] = _reproducible(module.backward)
    return Passes(**functions)


def _reproducible(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's backward pass, which is deterministic whether asked to be or not."""

    def run(*arguments: Any, deterministic: bool) -> Any:
        return backward(*arguments)

    return run


def load_triton(plan: Plan) -> ModuleType:
    """The plan's Triton module, from the cache or rendered anew.

    Raises:
        BackendError: the triton package is missing.
    """
    require_triton()
    source = render(plan).encode()
    entry = Cache().get_or_build(
        plan.name, plan.target, plan_key(plan), lambda: {_FILE: source}, metadata={"plan": plan.to_dict()}
    )
    return load_module(entry.path / _FILE, entry.files[_FILE])


def compile_kernels(plan: Plan, passes: Passes, device: torch.device | None) -> None:
    """Compile every kernel for ``device``, and load it there; without a GPU, CUDA's kernels for the plan's target.

    Lengths, strides and head counts are run-time arguments, so nothing is left to compile in a later call.

    Raises:
        BackendError: CUDA's compiler is missing, or cannot compile for ``device``.
    """
    with ThreadPoolExecutor() as pool:  # NVRTC lets go of the interpreter lock
        if device is None:
            jobs = [pool.submit(compile_pass, fused) for fused in plan.fused.values()]
        else:
            jobs = [pool.submit(getattr(passes, name).load, device) for name in plan.fused]
    for job in jobs:
        job.result()
    if device is not None and plan.tiles:
        exercise(plan, load_triton(plan), device, plan.served_by("triton"))
        torch.cuda.synchronize(device)


def exercise(plan: Plan, module: ModuleType, device: torch.device, passes: Collection[str]) -> None:
    """Call these passes of the plan's Triton module such that each of their kernels is launched."""
    spec = plan.spec

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype], device=device)

    k, v = zeros(1, 2, spec.cq, spec.head_dim), zeros(1, 2, spec.cq, spec.value_head_dim)
    weight = torch.zeros(2, spec.cq, spec.ck, device=device)
    out, lse = torch.zeros_like(v), torch.zeros(1, 2, spec.cq, device=device)
    if "forward" in passes:
        module.forward(k, k, v, weight, 1.0)
    if "backward" in passes:
        module.backward(out, lse, k, k, v, weight, out, lse, 1.0)
    if "decode" not in passes:
        return
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    for new_tokens in (1, MAX_NEW_TOKENS):
        q_tail = zeros(1, 2, spec.cq - 1 + new_tokens, spec.head_dim)
        for cache_seqlens in (None, lengths):
            module.decode(q_tail, k, v, weight, 1.0, cache_seqlens, None)
