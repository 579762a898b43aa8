"""The CUDA backend's runtime: compiler, loader, launcher, and the host functions of the passes.

Host functions allocate and launch. ``kernels`` maps roles to loaded kernels, ``plan`` is the pass's plan::

    forward.forward(kernels, plan, q, k, v, weight, scale) -> (out, lse)
    backward.backward(kernels, plan, grad_out, grad_lse, q, k, v, weight, out, lse, scale, *, deterministic)
        -> (dq, dk, dv, dweight)
    decode.decode(kernels, plan, q_tail, k_cache, v_cache, weight, scale, cache_seqlens, num_splits) -> (out, lse)

They take what :class:`mtagen.ops.executor.Executor` has prepared: 16-byte aligned rows with a last stride of 1,
contiguous fp32 weights, and at least one query and one key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .kernel import LoadedKernel


def load_pass(pass_plan: Any, device: torch.device) -> dict[str, LoadedKernel]:
    """Render, compile (or find in the cache) and load the kernels of a pass on a device; role -> kernel.

    Raises:
        BackendError: the compiler is missing or refuses the source, or the driver does.
    """
    from ...codegen.cuda import render
    from .compiler import cached_cubin
    from .kernel import load_kernels

    cubin = cached_cubin(render(pass_plan), pass_plan.target, pass_plan.kernels[0].name)
    return load_kernels(cubin, pass_plan.kernels, device)
