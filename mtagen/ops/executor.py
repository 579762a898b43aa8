"""Run a built op: generated kernels on their device, tiled PyTorch ops elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import cpu
from ..call import Call, Documents, Step
from ..dropout import Dropout
from ..errors import BackendError, explain
from ..runtime.load import Passes
from ..spec import Argument, Spec
from . import mask_tables
from .checks import is_aligned
from .copies import copied, with_earlier_zeros, without_pages


def plain_only(packed: bool, dropout: bool, page_size: int | None) -> Passes:
    """Refuse packed documents, dropout and pages, in an executor that was made without kernels for them.

    Raises:
        BackendError: always.
    """
    asked = (("packed documents", packed), ("dropout", dropout), ("pages", page_size))
    got = " and ".join(name for name, is_asked in asked if is_asked)
    raise BackendError(explain("kernels", got, "this op was made without them", "an op that mtagen.build returns"))


@dataclass(frozen=True)
class Executor:
    """The implementation of one built op.

    Attributes:
        spec: the operator.
        kernels: the passes made of generated kernels, or None for the torch backend.
        kernels_on_cpu: whether the kernels run in Triton's interpreter, on CPU tensors.
        torch_on_cpu: whether CPU tensors go to the torch backend (backend "auto" or "torch").
        deterministic: whether gradients are bit-reproducible; None: as ``torch.use_deterministic_algorithms`` says.
        variants: returns the passes with or without packed documents, with or without dropout, and
            for a page size, or None without pages; it may build them on first use.
    """

    spec: Spec
    kernels: Passes | None
    kernels_on_cpu: bool
    torch_on_cpu: bool
    deterministic: bool | None = None
    variants: Callable[[bool, bool, int | None], Passes] = plain_only

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """Return out (B, H, Nq, DV) in q.dtype and lse (B, H, Nq) in fp32 (fp64 for fp64).

        Then the tensor follows that :meth:`kept` describes, if any. With packed documents q, k and v are
        (total, heads, dim), out is (total_q, H, DV) and lse (H, total_q).
        """
        kernels = self._kernels_for(call.q, call.documents, call.dropout, _page_size(call.block_table, call.k))
        if call.block_table is not None:
            reads_pages = kernels is not None and kernels.reads_pages
            skips = kernels is not None and kernels.skips_earlier_rows and self.spec.mask == "source"
            if self.spec.context and not skips:
                call = with_earlier_zeros(call)
            call = call if reads_pages else copied(call)
        q, k, v, documents, dropout = call.q, call.k, call.v, call.documents, call.dropout
        if kernels is None:
            return cpu.forward(self.spec, call)
        if _sees_nothing(q, k, documents):
            rows = q.shape[:3] if documents is None else (q.shape[1], q.shape[0])
            return *_with_sink(call, *_empty_result(q, q.shape[:-1], rows, v)), *self.kept(call)
        with on_device_of(q):
            q, k, v = _aligned("q", q), _aligned("k", k), _aligned("v", v)
            weights = self._as_kernels_take(call) + mask_tables.of_call(self.spec, call, "forward", kernels.tables)
            assert kernels.forward is not None, "only passes for decode steps on pages have no forward"
            pages = _as_passed(None if call.block_table is None else (call.block_table,))
            others = (*_as_passed(documents), *pages, *_as_passed(dropout))
            return kernels.forward(q, k, v, *weights, call.scale, *others)

    def kept(self, call: Call) -> list[Tensor]:
        """Return an uninitialised tensor like the unmixed outputs that the forward pass returns, in a list.

        It is empty if the forward pass returns none: always for packed documents and dropout.
        :class:`.runtime.load.Passes` says what these outputs are. Tracing calls this function, so it builds no kernels.
        """
        plain = call.cu_seq_q is None and call.dropout_seed is None and call.block_table is None
        if self.kernels is None or not plain or (call.q.is_cpu and not self.kernels_on_cpu):
            return []
        columns = self.kernels.unmixed_columns
        return [call.q.new_empty(*call.q.shape[:-1], columns)] if columns else []

    def backward(self, call: Call, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Return the gradients of the tensors that a call gives, contiguous, in their dtypes.

        Those of integers and constants have the shape (0,). ``grad_lse`` is None if nothing depends on ``lse``.
        If the forward pass has returned unmixed outputs, ``out`` holds them instead.
        """
        q, k, v, documents, dropout = call.q, call.k, call.v, call.documents, call.dropout
        kernels = self._kernels_for(q, documents, dropout)
        if kernels is None:
            grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
            return [grad.contiguous() for grad in cpu.backward(self.spec, call, grad_out, grad_lse, out, lse)]
        weights = call.weights
        learned = call.learned if self.spec.learned_arguments else []
        if _sees_nothing(q, k, documents):
            grads = [x.zero_() for x in gradients_like((q, k, v, *weights, *learned), self.spec.have_gradients)]
            # Each row's log-sum-exp is the sink.
            if call.sink is not None and documents is None and grad_lse is not None:
                at = 3 + len(weights) + len(self.spec.ranks)
                grads[at] = grad_lse.sum((0, 2)).to(call.sink.dtype)
            return grads
        with on_device_of(q):
            q, k, v = _aligned("q", q), _aligned("k", k), _aligned("v", v)
            grad_out = grad_out if is_aligned(grad_out) else grad_out.clone(memory_format=torch.contiguous_format)
            assert kernels.backward is not None, "calls on pages have no backward"
            dq, dk, dv, *dweights = kernels.backward(
                grad_out,
                None if grad_lse is None else grad_lse.contiguous(),
                q,
                k,
                v,
                *self._as_kernels_take(call),
                *mask_tables.of_call(self.spec, call, "backward", kernels.tables),
                out.contiguous(),
                lse,
                call.scale,
                *_as_passed(documents),
                *_as_passed(dropout),
                deterministic=self._is_deterministic(),
            )
            if not weights:
                del dweights[0]
            grads = self._as_callers_take(call, dweights) if learned else dweights
            given = weights + learned
            grads = [dx if dx.dtype == x.dtype else dx.to(x.dtype) for dx, x in zip(grads, given, strict=True)]
            return [dq, dk, dv, *grads]

    def decode(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return out (B, H, n_new, DV) and lse (B, H, n_new)."""
        q_tail, k_cache, v_cache, cache_seqlens = step.q_tail, step.k_cache, step.v_cache, step.cache_seqlens
        kernels = self._kernels_for(q_tail, page_size=_page_size(step.block_table, k_cache))
        if kernels is None:
            return cpu.decode(self.spec, step if step.block_table is None else without_pages(step))
        if q_tail.numel() == 0 or k_cache.numel() == 0 or step.capacity == 0:
            shape = (*q_tail.shape[:2], q_tail.shape[2] - self.spec.context)
            return _with_sink(step, *_empty_result(q_tail, shape, shape, v_cache))
        with on_device_of(q_tail):
            q_tail = _aligned("q_tail", q_tail)
            k_cache, v_cache = _aligned("k_cache", k_cache), _aligned("v_cache", v_cache)
            lengths = None if cache_seqlens is None else cache_seqlens.contiguous()  # may be one length, expanded
            fp32_weights = self._as_kernels_take(step) + mask_tables.of_step(self.spec, step, kernels.tables)
            assert kernels.decode is not None, "batches without dropout decode"
            pages = () if step.block_table is None else (step.block_table.contiguous(), step.max_k)
            splits = step.num_splits or None
            return kernels.decode(q_tail, k_cache, v_cache, *fp32_weights, step.scale, lengths, splits, *pages)

    def _as_kernels_take(self, call: Call | Step) -> list[Tensor | None]:
        """Return the weights, the factors, the sink and the parameters of expressions in fp32.

        Kernels of plain attention take None for the weight of a single tap. Tokens of packed documents are the last
        axis of parameters there.
        """
        weights: list[Tensor | None] = [_as_fp32(weight) for weight in call.weights] or [None]
        if not self.spec.learned_arguments:
            return weights
        given = self._learned(call)
        masks = self.spec.mask_parameters
        read = ((x, moved) for argument, x, moved in given if argument.name not in masks)
        return weights + [_as_fp32(x.movedim(0, -1) if moved else x) for x, moved in read]

    def _as_callers_take(self, call: Call, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of what :meth:`_as_kernels_take` returns, in the shapes of a call."""
        weights = len(call.weights)
        of_kernels = iter(grads[weights:])
        learned = []
        for argument, x, moved in self._learned(call):
            if not argument.differentiable:
                learned.append(x.new_empty(0))
                continue
            grad = next(of_kernels)
            learned.append(grad.movedim(-1, 0).contiguous() if moved else grad)
        return [*grads[:weights], *learned]

    def _learned(self, call: Call | Step) -> list[tuple[Argument, Tensor, bool]]:
        """Return the factors, the sink and the parameters: description, tensor, and whether tokens are its first axis.

        Kernels read tables in place of what the mask reads.
        """
        packed = isinstance(call, Call) and call.cu_seq_q is not None
        arguments = self.spec.packed_learned_arguments if packed else self.spec.learned_arguments
        given = zip(arguments, call.learned, strict=True)
        return [(argument, x, argument.shape[:1] == ("total_k",)) for argument, x in given]

    def _is_deterministic(self) -> bool:
        return torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic

    def _kernels_for(
        self,
        q: Tensor,
        documents: Documents | None = None,
        dropout: Dropout | None = None,
        page_size: int | None = None,
    ) -> Passes | None:
        """Return the generated kernels if they serve q's device, None if the torch backend does."""
        if q.is_cpu and not self.kernels_on_cpu:
            if self.torch_on_cpu:
                return None
            rule = "the kernels of this op run on GPUs only"
            raise BackendError(explain("device", "cpu", rule, "a GPU, backend='auto', or TRITON_INTERPRET=1"))
        if self.kernels is None or (documents is None and dropout is None and page_size is None):
            return self.kernels
        return self.variants(documents is not None, dropout is not None, page_size)


def gradients_like(given: Sequence[Tensor], have_gradients: Sequence[bool]) -> list[Tensor]:
    """Return uninitialised gradients of the tensors that a call gives; of shape (0,) for those that have none."""
    return [x.new_empty(x.shape if has else 0) for x, has in zip(given, have_gradients, strict=True)]


def _page_size(block_table: Tensor | None, k: Tensor) -> int | None:
    return None if block_table is None else k.shape[2]


def _sees_nothing(q: Tensor, k: Tensor, documents: Documents | None) -> bool:
    """Return whether there is no query or no key, or no packed document holds any."""
    if q.numel() == 0 or k.numel() == 0:
        return True
    return documents is not None and (len(documents.cu_seq_q) == 1 or documents.max_q == 0 or documents.max_k == 0)


def _empty_result(q: Tensor, rows: Sequence[int], lse: Sequence[int], v: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs of 0, of shape (*rows, DV), and log-sum-exps of -inf, of shape ``lse``."""
    return q.new_zeros(*rows, v.shape[-1]), q.new_full(lse, -torch.inf, dtype=torch.float32)


def _with_sink(call: Call | Step, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return results of rows that see no key, whose log-sum-exps are the sink if the op has one.

    Packed rows after the last document have none.
    """
    if call.sink is None:
        return out, lse
    sinks = call.sink.to(lse.dtype)[:, None].expand(lse.shape)
    documents = call.documents if isinstance(call, Call) else None
    if documents is not None:
        rows = torch.arange(lse.shape[1], device=lse.device)
        return out, torch.where(rows < documents.cu_seq_q[-1], sinks, lse)
    return out, sinks.contiguous()


def _as_passed(values: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """Return ``values`` as arguments of a host function, tensors contiguous; none for None."""
    return () if values is None else tuple(x.contiguous() if isinstance(x, Tensor) else x for x in values)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` the current device, on which kernels are launched."""
    # The function of torch.cuda would also start CUDA, which a tensor there has done.
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(x.device)


def _as_fp32(weight: Tensor) -> Tensor:
    """Return the weight as kernels read it: fp32 (an exact conversion), contiguous and aligned."""
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        weight = weight.to(torch.float32).contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _aligned(name: str, x: Tensor) -> Tensor:
    if is_aligned(x):
        return x
    # Python shows a warning once per place and text.
    warnings.warn(
        f"{name} has strides {tuple(x.stride())} and starts at address {x.data_ptr() % 16} mod 16: rows that do not "
        "start at multiples of 16 bytes, or share memory, are copied before each call; align them to avoid it",
        RuntimeWarning,
        stacklevel=2,
    )
    return x.clone(memory_format=torch.contiguous_format)
