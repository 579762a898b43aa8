"""The contenders: mtagen's backends, peers that materialise scores, and SDPA, a lower bound without
convolution.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from ..accuracy import Comparison
from ..call import Documents
from ..check import check as check_op
from ..errors import BackendError, InputError, PlanError, explain
from ..measure.cases import DROPOUT_P, LENGTH, PAPER, Case, Sizes
from ..measure.inputs import Inputs, Sampler
from ..measure.judge import documents_op, eager_op, judge
from ..op import build
from ..ops.attention import AttentionOp
from ..planner import Plan
from ..spec import SINK, Spec
from .authors import authors_attention
from .expressions import name_expression
from .flex import SCORE_MODS, flex_op
from .names import BACKENDS, FLEX
from .suites import MAX_MATERIALISED

Attention = Callable[..., Any]  # of a contender's arguments; returns out, or the outs of several calls

_SCORE_TENSORS = 10  # tensors of scores alive at once in forward + backward; eager needed 5 in an observation
_CHECKED_LENGTH = 257
_CHECKED_DOCUMENTS = 3
_LIGER_MAX_LENGTH = 1024


class Contender(ABC):
    """One way to compute a case.

    Attributes:
        name: its name in the results.
        device: its device.
        only: which cases list it, default all.
        convolves: whether it takes the weight, and its time depends on the kernel.
        lasts: whether a call prepared for one case is as fast after other cases have been prepared.
    """

    convolves = True
    lasts = True

    def __init__(self, name: str, device: torch.device, only: Callable[[Case], bool] | None = None) -> None:
        self.name = name
        self.device = device
        self.only = only

    def enters(self, case: Case) -> bool:
        """Return whether results of ``case`` list the contender at all."""
        return self.only is None or self.only(case)

    @abstractmethod
    def refusal(self, case: Case) -> str | None:
        """Return why the contender cannot compute ``case``, or None if it can."""

    @abstractmethod
    def prepare(self, case: Case) -> Attention:
        """Return the function to time."""

    def arguments(self, case: Case, inputs: Inputs) -> list[Tensor]:
        """Return the arguments of that function: q, k, v and, if it convolves, the weights in their
        order.
        """
        return inputs.arguments if self.convolves else [inputs.q[:, :, -case.sizes.nq :], inputs.k, inputs.v]

    @abstractmethod
    def check(self, case: Case) -> Mapping[str, Comparison]:
        """Judge the contender by the rule of :mod:`mtagen.accuracy`, at a small size otherwise like
        ``case``.
        """

    def warm_key(self, case: Case) -> Hashable | None:
        """Return the identity of the files that :meth:`warm` builds; None if it builds none."""
        return None

    def warm(self, case: Case) -> None:  # noqa: B027  # most build nothing
        """Build the files for ``case`` that a disk cache keeps; called in parallel processes before
        measurements.
        """


class Built(Contender):
    """An op of ``mtagen.build``.

    Args:
        name: as in the results.
        device: where it runs.
        only: which cases list it, default all.
        options: arguments of ``mtagen.build``, besides those from the case.
    """

    def __init__(
        self, name: str, device: torch.device, only: Callable[[Case], bool] | None = None, **options: Any
    ) -> None:
        super().__init__(name, device, only)
        self._options = options
        self._ops: dict[Hashable, AttentionOp] = {}

    def enters(self, case: Case) -> bool:
        return case.spec.page_size is None and super().enters(case)

    def refusal(self, case: Case) -> str | None:
        try:
            self._op(case)
        except (PlanError, BackendError) as error:
            return str(error)
        return None

    def prepare(self, case: Case) -> Attention:
        op = self._op(case)
        call: Callable[..., Any] = op.decode if case.decodes else op
        if case.spec.packed:
            cu_seq = torch.tensor([0, *case.documents], device=self.device).cumsum(0).to(torch.int32)
            call = partial(op.varlen, **Documents(cu_seq, cu_seq, case.sizes.nk, case.sizes.nk)._asdict())
        if case.spec.dropout:
            call = partial(call, dropout_p=DROPOUT_P)
        return _by_position(call, case)

    def check(self, case: Case) -> Mapping[str, Comparison]:
        kv_heads = 1 if case.sizes.kv_heads < case.sizes.heads else 2
        n = _CHECKED_LENGTH + max(0, case.spec.window[0])  # long enough for a window to hide keys
        sizes = Sizes(_CHECKED_DOCUMENTS if case.spec.packed else 1, 2, kv_heads, n, n)
        return {row.result: row.comparison for row in check_op(self._op(case), case.spec, self.device, [sizes])}

    def plan(self, case: Case) -> Plan:
        """Return the plan, for the roofline of a case."""
        return self._op(case).plan

    def warm_key(self, case: Case) -> Hashable | None:
        return case.spec

    def warm(self, case: Case) -> None:
        self._op(case)

    def _op(self, case: Case) -> AttentionOp:
        """Return the op, built once: lengths are run-time arguments."""
        if case.spec not in self._ops:
            self._ops[case.spec] = build(**case.spec.to_dict(), **self._options)
        return self._ops[case.spec]


class Paged(Built):
    """An op of ``mtagen.build`` whose keys and values lie in pages, in random order."""

    def enters(self, case: Case) -> bool:
        return case.spec.page_size is not None and Contender.enters(self, case)

    def arguments(self, case: Case, inputs: Inputs) -> list[Tensor]:
        pages, _ = self._pages(case, inputs.k.device)
        q = inputs.q.transpose(1, 2).flatten(0, 1).contiguous()
        held = (_in_pages(x, pages, case) for x in (inputs.k, inputs.v))
        return [q, *held, *inputs.weights.values()]

    def prepare(self, case: Case) -> Attention:
        op, device = self._op(case), self.device
        table, lengths = self._pages(case, device)
        requests, context = case.sizes.batch, case.spec.context
        rows = case.sizes.nq + (context if case.decodes else 0)
        boundaries = torch.arange(requests + 1, device=device, dtype=torch.int32) * rows
        options = {"lengths": lengths, "max_q": rows, "max_k": case.sizes.nk}
        call = partial(op.paged, **options, block_table=table, cu_seq_q=None if case.decodes else boundaries)
        return torch.no_grad()(_by_position(call, case))

    def check(self, case: Case) -> Mapping[str, Comparison]:
        """Judge the op on whole caches, and compare its results from pages with those.

        Raises:
            AssertionError: they differ.
        """
        rows = case.sizes.nq if case.decodes else _CHECKED_LENGTH // 2
        small = replace(case, sizes=case.sizes._replace(batch=2, nq=rows, nk=_CHECKED_LENGTH))
        whole = _in_one_piece(small)
        inputs = make_inputs(whole, self.device)
        with torch.no_grad():
            from_pages = self.prepare(small)(*self.arguments(small, inputs)).unflatten(0, (2, -1)).transpose(1, 2)
            call, new = Built.prepare(self, whole), from_pages.shape[2]  # of a chunk, the first rows are earlier ones
            for entry, n in enumerate(_lengths(small)):
                own = slice(entry, entry + 1)
                one = call(inputs.q[own], inputs.k[own, :, :n], inputs.v[own, :, :n], *inputs.weights.values())
                torch.testing.assert_close(from_pages[own], one[:, :, -new:])
        return super().check(whole)

    def warm_key(self, case: Case) -> Hashable | None:
        return None  # only its first call builds kernels for pages

    def _op(self, case: Case) -> AttentionOp:
        return super()._op(_in_one_piece(case))

    @staticmethod
    def _pages(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the table of pages, in random order, and the lengths."""
        lengths, size = _lengths(case), case.spec.page_size or 1
        used = [-(-n // size) for n in lengths]
        order = torch.split(torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)), used)
        table = torch.nn.utils.rnn.pad_sequence([*order], batch_first=True)
        return table.to(device, torch.int32), torch.tensor(lengths, device=device, dtype=torch.int32)


def _in_one_piece(case: Case) -> Case:
    """Return the same case without pages, and with sequences of one length."""
    return replace(case, spec=replace(case.spec, packed=False, page_size=None))


def _lengths(case: Case) -> list[int]:
    """Return the keys of each request."""
    return case.documents or [case.sizes.nk] * case.sizes.batch


def _in_pages(x: Tensor, table: Tensor, case: Case) -> Tensor:
    """Return keys or values ``(B, Hkv, N, D)`` in pages ``(pages, size, Hkv, D)``."""
    lengths, size = _lengths(case), case.spec.page_size or 1
    pages = x.new_zeros(sum(-(-n // size) for n in lengths), size, x.shape[1], x.shape[3])
    for entry, n in enumerate(lengths):
        place = torch.arange(n, device=x.device)
        pages[table[entry, place // size], place % size] = x[entry, :, :n].transpose(0, 1)
    return pages


class Auto(Built):
    """``backend="auto"`` where it equals no other contender of the run.

    Args:
        name: as in the results.
        device: where it runs.
        beside: names of the run's contenders. Where a single backend serves ``auto``, the contender of that backend
            equals it.
    """

    def __init__(self, name: str, device: torch.device, beside: Collection[str] = BACKENDS) -> None:
        super().__init__(name, device, backend="auto")
        self._beside = beside

    def enters(self, case: Case) -> bool:
        if not super().enters(case):
            return False
        try:
            passes = self.plan(case).passes
            served = {f"mtagen {one.backend}" for one in passes if (one.plan.pass_name == "decode") == case.decodes}
            return len(served) > 1 or not served.issubset(self._beside)
        except Exception:  # the contender's row will show the error
            return True

    def warm_key(self, case: Case) -> Hashable | None:
        return None  # the backends that it combines are built anyway


class Unpacked(Built):
    """An op of ``mtagen.build`` that takes packed documents in another form, to compare packing
    with.

    The conversion of documents to that form is not timed.
    """

    @abstractmethod
    def arguments(self, case: Case, inputs: Inputs) -> list[Tensor]:
        """Return the documents in that form."""

    @abstractmethod
    def join(self, case: Case, outs: Any) -> Tensor:
        """Pack the op's results."""

    def enters(self, case: Case) -> bool:
        return case.spec.packed and super().enters(case)

    def prepare(self, case: Case) -> Attention:
        return super().prepare(case.base)

    def check(self, case: Case) -> Mapping[str, Comparison]:
        sizes = case.sizes._replace(batch=_CHECKED_DOCUMENTS, nq=_CHECKED_LENGTH, nk=_CHECKED_LENGTH)
        small = replace(case, sizes=sizes)
        inputs, grad_out = _packed(small, Sampler.for_checks, self.device)
        attend, eager = self.prepare(small), eager_op(case.spec, return_lse=True)

        def packed(q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> Tensor:
            return self.join(small, attend(*self.arguments(small, Inputs(q, k, v, weights))))

        def alone(*tensors: Tensor, document: int, **weights: Tensor) -> Any:
            return eager(*tensors, **weights)

        def formula(*tensors: Tensor, **weights: Tensor) -> Tensor:
            out: Tensor = documents_op(alone, small.documents, small.documents)(*tensors, **weights)[0]
            return out

        return judge(packed, formula, inputs, grad_out)

    def warm_key(self, case: Case) -> Hashable | None:
        return None  # the contender for packed documents builds these kernels, too

    def _op(self, case: Case) -> AttentionOp:
        return super()._op(case.base)


class OneByOne(Unpacked):
    """One call per document, each with its own weight tensors, so that no call waits to add
    gradients of weights.
    """

    def arguments(self, case: Case, inputs: Inputs) -> list[Tensor]:
        documents = zip(*(torch.split(x, case.documents) for x in (inputs.q, inputs.k, inputs.v)), strict=True)
        alone = ([x.transpose(0, 1)[None].contiguous() for x in document] for document in documents)
        return [x for document in alone for x in (*document, *inputs.weights.values())]

    def prepare(self, case: Case) -> Attention:
        attend, size = super().prepare(case), 3 + len(case.spec.weight_names)

        def one_by_one(*tensors: Tensor) -> list[Tensor]:
            return [attend(*tensors[at : at + size]) for at in range(0, len(tensors), size)]

        return one_by_one

    def join(self, case: Case, outs: Sequence[Tensor]) -> Tensor:
        return torch.cat([out[0].transpose(0, 1) for out in outs])


class Padded(Unpacked):
    """One call on a batch of all documents, padded with zeros."""

    def arguments(self, case: Case, inputs: Inputs) -> list[Tensor]:
        documents = (torch.split(x, case.documents) for x in (inputs.q, inputs.k, inputs.v))
        padded = (pad_sequence([*parts], batch_first=True) for parts in documents)
        return [*(x.transpose(1, 2).contiguous() for x in padded), *inputs.weights.values()]

    def join(self, case: Case, outs: Tensor) -> Tensor:
        return torch.cat([out[:, :n].transpose(0, 1) for out, n in zip(outs, case.documents, strict=True)])


class Peer(Contender):
    """Attention that is judged against a formula of its own, on a batch of whole sequences."""

    def enters(self, case: Case) -> bool:
        return case.base == case and super().enters(case)

    @abstractmethod
    def formula(self, case: Case) -> Attention:
        """Return the same function in plain PyTorch, for any dtype."""

    def check(self, case: Case) -> Mapping[str, Comparison]:
        sampler = self._small(case)
        inputs, grad_out = self._inputs(sampler), None if case.decodes else sampler.outputs()
        return judge(self.prepare(case), self.formula(case), inputs, grad_out)

    def _small(self, case: Case) -> Sampler:
        """Few heads, grouped like those of ``case``, of a short sequence, or of few rows at the end of one.

        They are in one group where those of ``case`` are, which may be mixed in another way than several.
        """
        rows = case.sizes.nq if case.decodes else _CHECKED_LENGTH
        shared = case.sizes.heads // case.sizes.kv_heads
        whole = math.lcm(shared, *case.spec.mixed.values())  # heads that all kinds of groups divide
        heads = min(2 * whole, case.sizes.heads)
        sizes = Sizes(1, heads, heads // shared, rows, _CHECKED_LENGTH)
        return Sampler.for_checks(case.spec, sizes, self.device)

    def _inputs(self, sampler: Sampler) -> Inputs:
        inputs = sampler.inputs()
        return inputs if self.convolves else replace(inputs, weights={})


class Materialising(Peer):
    """Attention whose scores are whole tensors.

    Args:
        name: as in the results.
        device: where it runs.
        max_length: more keys are refused.
        only: which cases list it, default all.
    """

    def __init__(
        self, name: str, device: torch.device, max_length: int, only: Callable[[Case], bool] | None = None
    ) -> None:
        super().__init__(name, device, only)
        self._max_length = max_length

    def refusal(self, case: Case) -> str | None:
        if case.decodes:
            return "has no decode: it would compute the scores of all rows anew"
        if case.sizes.nk > self._max_length:
            return f"scores of N > {self._max_length} are materialised only on request (--max-materialised)"
        need, free = _SCORE_TENSORS * case.score_bytes, self._free_bytes()
        if need > free:
            return f"may need {need / 2**30:.1f} GiB for scores, {(need - free) / 2**30:.1f} GiB over what is free"
        return None

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Eager(Materialising):
    """Plain PyTorch with autograd.

    Args:
        name: as in the results.
        device: where it runs.
        max_length: more keys are refused.
        only: which cases list it, default all.
        attention: returns the function to time for a spec, or raises ``BackendError``; default:
            ``mtagen.reference``.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        max_length: int,
        only: Callable[[Case], bool] | None = None,
        attention: Callable[[Spec], Attention] = eager_op,
    ) -> None:
        super().__init__(name, device, max_length, only)
        self._attention = attention

    def enters(self, case: Case) -> bool:
        # Unlike other peers, it computes any expression.
        whole = replace(case.spec, packed=False, dropout=False, window=(-1, -1)) == case.spec
        return whole and Contender.enters(self, case)

    def refusal(self, case: Case) -> str | None:
        try:
            self._attention(case.spec)
        except BackendError as error:
            return str(error)
        return super().refusal(case)

    def prepare(self, case: Case) -> Attention:
        return _by_position(self._attention(case.spec), case)

    def formula(self, case: Case) -> Attention:
        return _by_position(eager_op(case.spec), case)


class Compiled(Eager):
    """``torch.compile`` of plain PyTorch, one shape at a time."""

    lasts = False

    def prepare(self, case: Case) -> Attention:
        _forget_compiled()
        return torch.compile(super().prepare(case), dynamic=False)

    def warm_key(self, case: Case) -> Hashable | None:
        return None if self.refusal(case) else case.problem

    def warm(self, case: Case) -> None:
        inductor_config.compile_threads = 1  # there are many such processes
        function, inputs = self.prepare(case), make_inputs(case, self.device)
        function(*inputs.arguments)
        function(*(x.requires_grad_(inputs.has_gradient(x)) for x in inputs.arguments)).sum().backward()


class Liger(Materialising):
    """Liger-Kernel's multi-token attention: its convolution follows the softmax, and its window is centred.

    It pads both sides equally, so that a filter of even extent is extended with zeros to the next
    odd extent.
    """

    def refusal(self, case: Case) -> str | None:
        if find_spec("liger_kernel") is None:
            return "liger-kernel is not installed; pip install liger-kernel"
        if not case.causal:
            return "is causal only"
        if case.spec.weight_names != ("weight",):
            return "has one convolution and no other stage"
        if case.sizes.nk > _LIGER_MAX_LENGTH:
            return (
                f"a block of its mask's kernel takes all of N x N scores, and Triton's limit is N = {_LIGER_MAX_LENGTH}"
            )
        return super().refusal(case)

    def warm_key(self, case: Case) -> Hashable | None:
        return (
            None if self.refusal(case) else max(case.sizes.nk, _CHECKED_LENGTH).bit_length()
        )  # what its blocks depend on

    def warm(self, case: Case) -> None:
        few = case.sizes._replace(batch=1, heads=1, kv_heads=1)
        for sizes in (few, few._replace(nq=_CHECKED_LENGTH, nk=_CHECKED_LENGTH)):
            small = replace(case, sizes=sizes)
            leaves = [x.requires_grad_() for x in make_inputs(small, self.device).arguments]
            self.prepare(small)(*leaves).sum().backward()

    def prepare(self, case: Case) -> Attention:
        from liger_kernel.ops.multi_token_attention import LigerMultiTokenAttentionFunction

        def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
            weight, padding = _centred(weight.to(q.dtype))
            scores = q @ k.mT * q.shape[-1] ** -0.5
            mixed = LigerMultiTokenAttentionFunction.apply(scores, weight, None, 1, padding, 1, q.shape[1], False)
            return mixed @ v  # type: ignore[no-any-return]

        return attend

    def formula(self, case: Case) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
            weight, padding = _centred(weight.to(q.dtype))
            scores = q @ k.mT * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            shares = scores.masked_fill(later, -torch.inf).softmax(-1)
            mixed: Tensor = F.conv2d(shares, weight, padding=padding, groups=q.shape[1])
            return mixed.masked_fill(later, 0) @ v

        return attend


def _forget_compiled() -> None:
    """Forget what was compiled, so that it does not reach the limit of recompilations."""
    functorch_config.donated_buffer = False  # backward passes are timed alone, with retain_graph
    torch.compiler.reset()


def _by_position(function: Callable[..., Any], case: Case) -> Attention:
    """Wrap a function that takes weights and parameters by name to take them by position."""
    spec = case.spec
    weights = [*spec.weight_names, *spec.ranks, *[SINK.name] * spec.sink]
    parameters = [name for name, _ in spec.parameters]
    if weights == ["weight"] and not parameters:
        return function

    def attend(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, **named: Any) -> Tensor:
        given: dict[str, Any] = dict(zip(weights, tensors, strict=False))
        if parameters and tensors:
            given["parameters"] = dict(zip(parameters, tensors[len(weights) :], strict=True))
        out: Tensor = function(q, k, v, **given, **named)
        return out

    return attend


def _centred(weight: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return ``(H, cq, ck)`` as a grouped convolution's ``(H, 1, odd, odd)``, and the padding that
    keeps sizes.
    """
    cq, ck = weight.shape[1:]
    return F.pad(weight, (0, 1 - ck % 2, 0, 1 - cq % 2))[:, None], (cq // 2, ck // 2)


class Sdpa(Peer):
    """``scaled_dot_product_attention``: plain attention.

    Args:
        name: as in the results.
        device: where it runs.
        backend: the backend of the kernels; ``None``: PyTorch's choice.
    """

    convolves = False

    def __init__(self, name: str, device: torch.device, backend: SDPBackend | None = None) -> None:
        super().__init__(name, device)
        self._backend = backend

    def refusal(self, case: Case) -> str | None:
        if case.causal and not case.decodes and case.sizes.nq != case.sizes.nk:
            return "PyTorch aligns its causal mask to the first key, not to the last"
        try:
            inputs = self._inputs(self._small(case))
            self.prepare(case)(*(x.requires_grad_(not case.decodes) for x in inputs.arguments))
        except RuntimeError as error:
            return f"PyTorch has no such kernel: {str(error).splitlines()[0]}"
        return None

    def prepare(self, case: Case) -> Attention:
        attend: Attention = partial(
            scaled_dot_product_attention,
            is_causal=case.causal and not case.decodes,
            enable_gqa=case.sizes.heads != case.sizes.kv_heads,
        )
        if self._backend is None:
            return attend
        within: Attention = sdpa_kernel(self._backend)(attend)
        return within

    def formula(self, case: Case) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if case.causal and not case.decodes:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            out: Tensor = scores.softmax(-1) @ v
            return out

        return attend


class Flex(Peer):
    """FlexAttention: plain attention, with the expressions that it has.

    Args:
        name: as in the results.
        device: where it runs.
        compiled: whether it is compiled.
    """

    convolves = False
    lasts = False

    def __init__(self, name: str, device: torch.device, *, compiled: bool = True) -> None:
        super().__init__(name, device)
        self._compiled = compiled

    def enters(self, case: Case) -> bool:
        return replace(case.base.spec, kernel=None) == case.base.spec and case.causal and not case.decodes

    def refusal(self, case: Case) -> str | None:
        if name_expression(case.spec, case.sizes.heads) not in SCORE_MODS:
            return "this expression was not written for FlexAttention, or it has no such option"
        attend, inputs, grad_out = self._small_call(case)
        try:
            tensors = self.arguments(case, inputs)
            attend(*(x.requires_grad_(inputs.has_gradient(x)) for x in tensors)).backward(grad_out)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return f"does not run: {next(iter(str(error).splitlines()), '')}"
        return None

    def arguments(self, case: Case, inputs: Inputs) -> list[Tensor]:
        return [inputs.q, inputs.k, inputs.v, *inputs.parameters.values()]

    def prepare(self, case: Case) -> Attention:
        if self._compiled:
            _forget_compiled()
        op = flex_op(case.spec, case.sizes.heads, case.sizes.nk, self.device, compiled=self._compiled)
        assert op is not None
        return op

    def check(self, case: Case) -> Mapping[str, Comparison]:
        attend, inputs, grad_out = self._small_call(case)

        def by_name(*qkv: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Any:
            return attend(*qkv, *(parameters or {}).values())

        return judge(by_name, self.formula(case), inputs, grad_out)

    def _small_call(self, case: Case) -> tuple[Attention, Inputs, Tensor]:
        """The op on a short sequence, its arguments, and the gradient of its output."""
        sizes = case.sizes._replace(batch=1, nq=_CHECKED_LENGTH, nk=_CHECKED_LENGTH)
        sampler = Sampler.for_checks(case.spec, sizes, self.device)
        return self.prepare(replace(case, sizes=sizes)), sampler.inputs(), sampler.outputs()

    def formula(self, case: Case) -> Attention:
        return eager_op(case.spec)


def entrants(
    suite: str, device: torch.device, names: Sequence[str] = (), max_materialised: int = MAX_MATERIALISED
) -> list[Contender]:
    """Return the contenders of a suite.

    Args:
        suite: name of the suite.
        device: device of the contenders.
        names: names of the contenders; default: mtagen's in ``overhead`` and ``data``, mtagen's and
            eager in ``memory``, else all; contenders that take packed documents in another form are
            in ``data`` only, and FlexAttention in ``scores``.
        max_materialised: largest length for contenders that materialise scores.

    Raises:
        InputError: no such contender on this device.
    """
    present = {contender.name: contender for contender in _contenders(device, max_materialised, names or BACKENDS)}
    for name in names:
        if name not in present:
            raise InputError(explain("contender", name, f"is no contender on {device.type}", tuple(present)))
    prefixes = {"overhead": ("mtagen",), "memory": ("mtagen", "eager"), "data": ("mtagen",)}.get(suite, ("",))
    if names:
        return [present[name] for name in present if name in names]
    only = {Unpacked: "data", Flex: "scores", Paged: "serving"}
    elsewhere = tuple(kind for kind, where in only.items() if where != suite)
    listed = [contender for contender in present.values() if contender.name.startswith(prefixes)]
    return [contender for contender in listed if not isinstance(contender, elsewhere)]


def _contenders(device: torch.device, max_materialised: int, beside: Collection[str]) -> list[Contender]:
    theirs: dict[str, Any] = {"only": _is_a_pipeline, "attention": authors_attention}
    plain = [
        Eager("eager", device, max_materialised),
        Compiled("torch.compile", device, max_materialised),
        Eager("authors", device, max_materialised, **theirs),
        Compiled("authors compiled", device, max_materialised, **theirs),
    ]
    if device.type == "cpu":
        ours: dict[str, Any] = {"backend": "torch", "target": "cpu"}
        return [
            Built("mtagen torch", device, **ours),
            Paged("mtagen torch paged", device, **ours),
            OneByOne("mtagen torch one by one", device, **ours),
            Padded("mtagen torch padded", device, **ours),
            *plain,
            Sdpa("sdpa", device),
        ]
    return [
        Built("mtagen cuda", device, backend="cuda"),
        Built("mtagen triton", device, backend="triton"),
        Paged("mtagen cuda paged", device, backend="cuda"),
        Paged("mtagen triton paged", device, backend="triton"),
        Auto("mtagen auto", device, beside),
        Built("mtagen cuda sm_80", device, only=_is_the_papers, backend="cuda", target="sm_80"),
        Built("mtagen triton sm_80", device, only=_is_the_papers, backend="triton", target="sm_80"),
        Built("mtagen triton sm_89", device, only=_is_the_papers, backend="triton", target="sm_89"),
        Built("mtagen cuda deterministic", device, only=_is_the_papers, backend="cuda", deterministic=True),
        OneByOne("mtagen cuda one by one", device, backend="cuda"),
        Padded("mtagen cuda padded", device, backend="cuda"),
        *plain,
        Liger("liger (post-softmax)", device, max_materialised),
        Flex(FLEX, device),
        Sdpa("sdpa flash", device, SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa cudnn", device, SDPBackend.CUDNN_ATTENTION),
    ]


def _is_a_pipeline(case: Case) -> bool:
    return not case.spec.convolves_only and case.base == case


def _is_the_papers(case: Case) -> bool:
    return case.spec.kernel == PAPER and case.base == case and case.sizes.nk == LENGTH and not case.decodes


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw the inputs on which a case is timed; packed documents are ``(total, H, D)``, one after
    the other.
    """
    if case.spec.packed and not case.spec.page_size:
        return _packed(case, Sampler.for_timing, device)[0]
    return Sampler.for_timing(case.spec, case.sizes, device).inputs(decode=case.decodes)


def _packed(
    case: Case, sampler: Callable[[Spec, Sizes, torch.device], Sampler], device: torch.device
) -> tuple[Inputs, Tensor]:
    """Draw packed documents and the gradient of their output, as one sequence of all tokens without
    a batch axis.
    """
    total = sum(case.documents)
    one = replace(sampler(case.spec, case.sizes._replace(batch=1, nq=total, nk=total), device), rows_outside_heads=True)
    inputs = one.inputs()
    q, k, v, grad_out = (x[0].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v, one.outputs()))
    return replace(inputs, q=q, k=k, v=v), grad_out
