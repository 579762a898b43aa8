"""The CUDA backend's runtime: compiler, loader, launcher, and the host functions of the passes.

Host functions allocate and launch. ``kernels`` maps roles to loaded kernels, ``plan`` is the pass's plan::

    forward.forward(kernels, plan, q, k, v, weight, scale) -> (out, lse)
    backward.backward(kernels, plan, grad_out, grad_lse, q, k, v, weight, out, lse, scale, *, deterministic)
        -> (dq, dk, dv, dweight)
    decode.decode(kernels, plan, q_tail, k_cache, v_cache, weight, scale, cache_seqlens, num_splits) -> (out, lse)

They take what :class:`mtagen.ops.executor.Executor` has prepared: q, k, v and grad_out with 16-byte aligned rows and a
last stride of 1; contiguous weight (fp32), out, lse and grad_lse; at least one query and one key. Their device is
current.
"""

from .compiler import cuda_is_installed
from .passes import CudaPass, compile_pass, cuda_pass, load_pass

__all__ = ["CudaPass", "compile_pass", "cuda_is_installed", "cuda_pass", "load_pass"]
