"""Who competes: mtagen's backends, peers that materialise scores, and SDPA, a lower bound without convolution."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
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

from ..accuracy import Comparison
from ..check import check as check_op
from ..errors import BackendError, InputError, PlanError, explain
from ..measure.cases import LENGTH, PAPER, Case, Sizes
from ..measure.inputs import Inputs, Sampler
from ..measure.judge import eager_op, judge
from ..op import build
from ..ops.attention import MultiTokenAttention
from ..planner import Plan
from ..spec import Spec
from .authors import authors_attention
from .suites import MAX_MATERIALISED

Attention = Callable[..., Tensor]  # of q, k, v and, if it convolves, the weights in their order

_SCORE_TENSORS = 10  # alive at once in forward + backward; eager was seen to need 5
_CHECKED_LENGTH = 257
_LIGER_MAX_LENGTH = 1024


class Contender(ABC):
    """One way to compute a case.

    Attributes:
        name: as in the results.
        device: where it runs.
        only: which cases list it, default all.
        convolves: whether it takes the weight, and its time depends on the kernel.
        lasts: whether what was prepared for one case is as fast after others were.
    """

    convolves = True
    lasts = True

    def __init__(self, name: str, device: torch.device, only: Callable[[Case], bool] | None = None) -> None:
        self.name = name
        self.device = device
        self.only = only

    def enters(self, case: Case) -> bool:
        """Whether results of ``case`` list it at all."""
        return self.only is None or self.only(case)

    @abstractmethod
    def refusal(self, case: Case) -> str | None:
        """Why it cannot do ``case``, if so."""

    @abstractmethod
    def prepare(self, case: Case) -> Attention:
        """What is to be timed."""

    @abstractmethod
    def check(self, case: Case) -> Mapping[str, Comparison]:
        """Its results, judged by the rule of :mod:`mtagen.accuracy`, at a small size otherwise like ``case``."""

    def warm_key(self, case: Case) -> Hashable | None:
        """What :meth:`warm` builds; None: it builds nothing that is kept on disk."""
        return None

    def warm(self, case: Case) -> None:  # noqa: B027  # most build nothing
        """Build for ``case`` what is kept on disk; called in processes side by side, before the one that measures."""


class Built(Contender):
    """An op of ``mtagen.build``.

    Args:
        name: as in the results.
        device: where it runs.
        only: which cases list it, default all.
        options: of ``mtagen.build``, besides those that the case gives.
    """

    def __init__(
        self, name: str, device: torch.device, only: Callable[[Case], bool] | None = None, **options: Any
    ) -> None:
        super().__init__(name, device, only)
        self._options = options
        self._ops: dict[Hashable, MultiTokenAttention] = {}

    def refusal(self, case: Case) -> str | None:
        try:
            self._op(case)
        except (PlanError, BackendError) as error:
            return str(error)
        return None

    def prepare(self, case: Case) -> Attention:
        op = self._op(case)
        return _by_position(op.decode if case.decodes else op, case)

    def check(self, case: Case) -> Mapping[str, Comparison]:
        kv_heads = 1 if case.sizes.kv_heads < case.sizes.heads else 2
        sizes = Sizes(1, 2, kv_heads, _CHECKED_LENGTH, _CHECKED_LENGTH)
        return {row.result: row.comparison for row in check_op(self._op(case), case.spec, self.device, [sizes])}

    def plan(self, case: Case) -> Plan:
        """What its time is compared with."""
        return self._op(case).plan

    def warm_key(self, case: Case) -> Hashable | None:
        return case.spec

    def warm(self, case: Case) -> None:
        self._op(case)

    def _op(self, case: Case) -> MultiTokenAttention:
        """Built once: lengths are run-time arguments."""
        if case.spec not in self._ops:
            self._ops[case.spec] = build(**case.spec.to_dict(), **self._options)
        return self._ops[case.spec]


class Auto(Built):
    """``backend="auto"`` where it trains with two backends: elsewhere it is another contender."""

    def enters(self, case: Case) -> bool:
        try:
            passes = self.plan(case).passes
            return len({one.backend for one in passes if (one.plan.pass_name == "decode") == case.decodes}) > 1
        except Exception:  # whatever it is, its row says so
            return True

    def warm_key(self, case: Case) -> Hashable | None:
        return None  # those that it mixes are built anyway


class Peer(Contender):
    """Attention that is judged against a formula of its own."""

    @abstractmethod
    def formula(self, case: Case) -> Attention:
        """The same in plain PyTorch, in any dtype."""

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
        attention: makes what is timed of a spec, or raises ``BackendError``; default: ``mtagen.reference``.
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
        functorch_config.donated_buffer = False  # the backward pass is timed alone, with retain_graph
        torch.compiler.reset()  # or the shapes would meet the limit of recompilations
        return torch.compile(super().prepare(case), dynamic=False)

    def warm_key(self, case: Case) -> Hashable | None:
        return None if self.refusal(case) else case.problem

    def warm(self, case: Case) -> None:
        inductor_config.compile_threads = 1  # there are many such processes
        function, tensors = self.prepare(case), make_inputs(case, self.device).arguments
        function(*tensors)
        function(*(x.requires_grad_() for x in tensors)).sum().backward()  # type: ignore[no-untyped-call]


class Liger(Materialising):
    """Liger-Kernel's multi-token attention: its convolution follows the softmax, and its window is centred.

    It pads alike on both sides, so that an even extent is widened by zeros to the next odd one.
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
            self.prepare(small)(*leaves).sum().backward()  # type: ignore[no-untyped-call]

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


def _by_position(function: Callable[..., Any], case: Case) -> Attention:
    """A function that takes weights by name, as one that takes them in their order as well."""
    names = case.spec.weight_names
    if names == ("weight",):
        return function

    def attend(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor, **named: Any) -> Tensor:
        out: Tensor = function(q, k, v, **dict(zip(names, weights, strict=False)), **named)
        return out

    return attend


def _centred(weight: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """``(H, cq, ck)`` as a grouped convolution's ``(H, 1, odd, odd)``, and the padding that keeps sizes."""
    cq, ck = weight.shape[1:]
    return F.pad(weight, (0, 1 - ck % 2, 0, 1 - cq % 2))[:, None], (cq // 2, ck // 2)


class Sdpa(Peer):
    """``scaled_dot_product_attention``: plain attention.

    Args:
        name: as in the results.
        device: where it runs.
        backend: whose kernels, ``None``: PyTorch's choice.
    """

    convolves = False

    def __init__(self, name: str, device: torch.device, backend: SDPBackend | None = None) -> None:
        super().__init__(name, device)
        self._backend = backend

    def refusal(self, case: Case) -> str | None:
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


def entrants(
    suite: str, device: torch.device, names: Sequence[str] = (), max_materialised: int = MAX_MATERIALISED
) -> list[Contender]:
    """Who takes part in a suite.

    Args:
        suite: its name.
        device: where they run.
        names: these alone; default: mtagen's in ``overhead``, these and eager in ``memory``, else all.
        max_materialised: lengths beyond are refused by those that materialise scores.

    Raises:
        InputError: no such contender on this device.
    """
    present = {contender.name: contender for contender in _contenders(device, max_materialised)}
    for name in names:
        if name not in present:
            raise InputError(explain("contender", name, f"is not known on {device.type}", tuple(present)))
    prefixes = {"overhead": ("mtagen",), "memory": ("mtagen", "eager")}.get(suite, ("",))
    return [present[name] for name in present if (name in names if names else name.startswith(prefixes))]


def _contenders(device: torch.device, max_materialised: int) -> list[Contender]:
    theirs: dict[str, Any] = {"only": _is_a_pipeline, "attention": authors_attention}
    plain = [
        Eager("eager", device, max_materialised),
        Compiled("torch.compile", device, max_materialised),
        Eager("authors", device, max_materialised, **theirs),
        Compiled("authors compiled", device, max_materialised, **theirs),
    ]
    if device.type == "cpu":
        return [Built("mtagen torch", device, backend="torch", target="cpu"), *plain, Sdpa("sdpa", device)]
    return [
        Built("mtagen cuda", device, backend="cuda"),
        Built("mtagen triton", device, backend="triton"),
        Auto("mtagen auto", device, backend="auto"),
        Built("mtagen cuda sm_80", device, only=_is_the_papers, backend="cuda", target="sm_80"),
        Built("mtagen triton sm_80", device, only=_is_the_papers, backend="triton", target="sm_80"),
        Built("mtagen triton sm_89", device, only=_is_the_papers, backend="triton", target="sm_89"),
        Built("mtagen cuda deterministic", device, only=_is_the_papers, backend="cuda", deterministic=True),
        *plain,
        Liger("liger (post-softmax)", device, max_materialised),
        Sdpa("sdpa flash", device, SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa cudnn", device, SDPBackend.CUDNN_ATTENTION),
    ]


def _is_a_pipeline(case: Case) -> bool:
    return not case.spec.convolves_only


def _is_the_papers(case: Case) -> bool:
    return case.spec.kernel == PAPER and case.sizes.nk == LENGTH and not case.decodes


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """What a case is timed on."""
    return Sampler.for_timing(case.spec, case.sizes, device).inputs(decode=case.decodes)
