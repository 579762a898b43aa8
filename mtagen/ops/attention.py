"""The callable, differentiable op of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codegen import render
from ..config import Config
from ..dtypes import TORCH_DTYPES
from ..errors import BackendError, explain
from ..planner import Plan
from ..runtime.load import compile_kernels, load, plan_key
from . import library
from .executor import Executor
from .inputs import check_call, check_decode, resolve_scale


class MultiTokenAttention:
    """A built op. Made by :func:`mtagen.build`; holds no parameters.

    Attributes:
        plan: what was decided and why; ``print(op.plan)`` shows it as a table.
    """

    def __init__(self, plan: Plan, key: str, dtypes: tuple[torch.dtype, ...]) -> None:
        self.plan = plan
        self._spec = plan.spec
        self._key = key
        self._dtypes = dtypes

    def __repr__(self) -> str:
        return f"<mtagen op {self.plan.name}, backend {self.plan.backend}>"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """mix(conv(softmax(mix(conv(scale * q k^T))))) v, differentiable once in all of q, k, v and weights.

        :func:`mtagen.reference` defines it. Each stage that the op was built with takes its weight, fp32 or of q's
        dtype; other weights are not given.

        Args:
            q: ``(B, H, Nq, D)``; query i sits at position i + Nk - Nq. Any strides, the last one 1.
            k: ``(B, Hkv, Nk, D)``, H a multiple of Hkv.
            v: ``(B, Hkv, Nk, DV)``.
            weight: of the convolution before the softmax, ``(H, cq, ck)`` or ``(H, 1, cq, ck)``.
            head_weight: of the mixture before the softmax, ``(H/m, m, m)``, indexed [group, out head, in head], or
                ``(m, m)`` if m = H. Groups are of consecutive heads.
            post_weight: of the convolution after the softmax, as ``weight``.
            post_head_weight: of the mixture after the softmax, as ``head_weight``.
            scale: factor of q k^T, default ``D ** -0.5``.
            return_lse: also return log sum exp of each row as the softmax takes it, ``(B, H, Nq)`` fp32.

        Returns:
            ``(B, H, Nq, DV)`` in q's dtype. Rows that see no key are 0 with a log-sum-exp of -inf. Under
            ``torch.autocast`` q, k and v are cast to its dtype first.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
        """
        q, k, v = _autocast(q, k, v)
        given = (weight, head_weight, post_weight, post_head_weight)
        weights = check_call(self._spec, self._dtypes, q, k, v, given)
        scale = resolve_scale(scale, self._spec.head_dim)
        out, lse = torch.ops.mtagen.forward.default(q, k, v, *weights, scale, self._key)
        return (out, lse) if return_lse else out

    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor | None = None,
        *,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        scale: float | None = None,
        num_splits: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The last rows of the op, for generation: 1..8 new queries against a cache of keys and values.

        Args:
            q_tail: ``(B, H, context + n_new, D)``: the queries before the new ones that these depend on, cq - 1 for
                each convolution, then the new ones. Rows at positions before the sequence's start count as zero
                whatever they hold.
            k_cache: ``(B, Hkv, N, D)``, the new tokens' keys included.
            v_cache: ``(B, Hkv, N, DV)``.
            weight, head_weight, post_weight, post_head_weight: as in the op.
            cache_seqlens: ``(B,)`` int32, keys in use per batch entry (0..N; larger counts as N), default N. Keys
                beyond are ignored whatever they hold.
            scale: as in the op.
            num_splits: parts the keys are split into (flash decoding); planned by default.
            return_lse: also return ``(B, H, n_new)`` log-sum-exps.

        Returns:
            ``(B, H, n_new, DV)`` in q_tail's dtype; not differentiable.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
        """
        q_tail, k_cache, v_cache = _autocast(q_tail, k_cache, v_cache)
        given = (weight, head_weight, post_weight, post_head_weight)
        weights = check_decode(self._spec, self._dtypes, q_tail, k_cache, v_cache, given, cache_seqlens, num_splits)
        out, lse = torch.ops.mtagen.decode.default(
            q_tail,
            k_cache,
            v_cache,
            *weights,
            cache_seqlens,
            resolve_scale(scale, self._spec.head_dim),
            num_splits or 0,
            self._key,
        )
        return (out, lse) if return_lse else out


def assemble(
    planned: Plan, *, torch_on_cpu: bool = True, dtype: str | None = None, deterministic: bool | None = None
) -> MultiTokenAttention:
    """Compile what a plan needs and make its op.

    Args:
        planned: the plan.
        torch_on_cpu: whether tiled PyTorch ops serve tensors on the CPU.
        dtype: the only one that the op takes; default: the plan's, or any where PyTorch computes all passes.
        deterministic: as in :func:`mtagen.build`.

    Raises:
        BackendError: the plan's backend cannot be used here.
    """
    spec, interpreted, generated = planned.spec, Config.from_env().triton_interpret, planned.backend != "torch"
    if interpreted and spec.dtype == "bf16" and planned.triton:
        rule = "Triton's interpreter computes bf16 wrongly"
        raise BackendError(explain("dtype", "bf16", rule, "fp32 or fp16, or a GPU"))
    sources = render(planned)
    if generated and not interpreted:
        compile_kernels(planned, sources)
    kernels = load(planned, sources) if generated else None
    executor = Executor(
        spec,
        kernels,
        kernels_on_cpu=generated and interpreted,
        torch_on_cpu=torch_on_cpu,
        deterministic=deterministic,
    )
    key = f"{plan_key(planned, sources)}-torch_on_cpu{torch_on_cpu:d}-deterministic{deterministic}"
    library.register(key, executor)
    fixed = dtype or (spec.dtype if generated else None)
    return MultiTokenAttention(planned, key, (TORCH_DTYPES[fixed],) if fixed else tuple(TORCH_DTYPES.values()))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What ``torch.autocast`` asks of an attention op: q, k and v in its dtype, the weight as it is."""
    if not torch._C._is_any_autocast_enabled():  # this takes half the time of the questions below
        return tensors
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # PyTorch refuses to say for meta tensors
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and _is_castable(x) else x for x in tensors)


def _is_castable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # as PyTorch's own ops: fp64 is meant
