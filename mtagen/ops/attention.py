"""The callable, differentiable op of a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ..arguments import resolve_scale
from ..call import Documents
from ..codegen import Sources, render
from ..config import Config
from ..dropout import check_dropout_p, check_seed, draw_seed
from ..dtypes import TORCH_DTYPES
from ..errors import BackendError, InputError, PlanError, SpecError, explain
from ..planner import BACKENDS, Plan, plan
from ..runtime.load import Passes, compile_kernels, load, plan_key
from ..spec import MAX_NEW_TOKENS, DType, Spec
from . import library
from .checks import check_call, check_decode, check_heads, check_slots, check_splits, check_varlen
from .executor import Executor
from .pages import (
    Pages,
    Routes,
    check_page_size,
    check_paged,
    check_threshold,
)
from .requests import Results, last_rows, merge

if TYPE_CHECKING:
    from typing_extensions import NotRequired, Unpack  # of typing itself from Python 3.11 on


class _Options(TypedDict, total=False):
    """Arguments that calls, varlen and decode take by name, for their overloads."""

    head_weight: Tensor | None
    post_weight: Tensor | None
    post_head_weight: Tensor | None
    sink: Tensor | None
    parameters: Mapping[str, Tensor] | None
    scale: float | None


class _Factors(TypedDict, total=False):
    query_factors: Tensor | None
    key_factors: Tensor | None
    post_query_factors: Tensor | None
    post_key_factors: Tensor | None


class _DropoutOptions(_Options, total=False):
    dropout_p: float
    dropout_seed: Tensor | None


class _CallOptions(_DropoutOptions, _Factors, total=False):
    pass


class _VarlenOptions(_DropoutOptions):
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class _PagedOptions(_Options):
    block_table: Tensor
    cu_seq_q: Tensor | None
    lengths: Tensor
    max_q: int
    max_k: int
    num_splits: NotRequired[int | None]
    decode_threshold: NotRequired[int]


class _DecodeOptions(_Options, _Factors, total=False):
    cache_seqlens: Tensor | None
    num_splits: int | None


class AttentionOp:
    """A built op, made by :func:`mtagen.build`. It holds no parameters and never changes.

    Copying an op returns the op itself. A pickle holds the arguments of :func:`mtagen.build`;
    unpickling builds the op again for the machine at hand.

    Attributes:
        plan: the plan of the op with its reasons; ``print(op.plan)`` shows it as a table.
        dtypes: dtypes that q, k and v may have.
    """

    def __init__(
        self,
        plan: Plan,
        key: str,
        dtypes: tuple[torch.dtype, ...],
        drops: bool = False,
        build_again: Callable[[], AttentionOp] | None = None,
    ) -> None:
        self.plan = plan
        self._spec = plan.spec
        self._key = key
        self.dtypes = dtypes
        self._drops = drops
        self._build_again = build_again
        # Fill cached properties now, because torch.compile cannot trace their first use.
        _ = plan.spec.weight_names, plan.spec.context
        if plan.spec.learned_arguments:
            with suppress(SpecError):  # calls report a parameter that packed documents cannot have
                _ = plan.spec.packed_learned_arguments

    def __repr__(self) -> str:
        return f"<mtagen op {self.plan.name}, backend {self.plan.backend}>"

    def __copy__(self) -> AttentionOp:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionOp:
        return self

    def __reduce__(self) -> tuple[Callable[[], AttentionOp], tuple[()]]:
        """Pickle the call that builds the op: loaded kernels and its key belong to this process.

        Raises:
            BackendError: the op was not made by :func:`mtagen.build`.
        """
        if self._build_again is None:
            rule = "an op of a plan that was made by hand cannot be pickled"
            raise BackendError(explain("op", self, rule, "what mtagen.build returns"))
        return self._build_again, ()

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_CallOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[_CallOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: bool,
        **options: Unpack[_CallOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
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
        query_factors: Tensor | None = None,
        key_factors: Tensor | None = None,
        post_query_factors: Tensor | None = None,
        post_key_factors: Tensor | None = None,
        sink: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        scale: float | None = None,
        dropout_p: float = 0,  # torch.compile would make a symbol of a float, and compile twice
        dropout_seed: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute dropout(mix(conv(softmax(mix(conv(scale * q k^T)))))) v.

        The result is differentiable once in q, k, v, the weights, the sink and the parameters of
        expressions; :func:`mtagen.reference` defines it. Each stage that the op was built with needs its weight,
        in fp32 or in q's dtype. Weights of other stages must be left out.

        Args:
            q: ``(B, H, Nq, D)``; query i sits at position i + Nk - Nq. Any strides, the last one 1.
            k: ``(B, Hkv, Nk, D)``, H a multiple of Hkv.
            v: ``(B, Hkv, Nk, DV)``.
            weight: filters of the convolution before the softmax, ``(H, cq, ck)`` or ``(H, 1, cq,
                ck)``.
            head_weight: matrices that mix heads before the softmax, ``(H/m, m, m)``, indexed
                [group, out head, in head], or ``(m, m)`` if m = H. A group is m consecutive heads.
            post_weight: filters of the convolution after the softmax, like ``weight``.
            post_head_weight: matrices that mix heads after the softmax, like ``head_weight``.
            query_factors: ``(B, H, Nq, 2 R + 1)`` with R = rank_q of an op that was built with
                ``dynamic_ranks=(rank_q, rank_k)``: what each query adds to the matrix of its group. With
                ``a = query_factors[b, :, i]``, entry [out head g, in head h] gets the sum over r < R of
                ``a[g, R + r] * a[h, r]``, and ``a[g, 2 R]`` if g = h. Like parameters they are in fp32
                or q's dtype.
            key_factors: ``(B, H, Nk, 2 R + 1)`` with R = rank_k: the same of each key. H counts the
                heads of queries.
            post_query_factors, post_key_factors: the same for ``post_dynamic_ranks`` and
                ``post_head_weight``.
            sink: ``(H,)``, one more logit of each row's softmax, which has no value; of an op that
                was built with ``sink=True``. Like parameters it is in fp32 or q's dtype.
            parameters: the tensors that expressions and ``visible`` read, by name; those of
                ``visible`` are int32, or also int64 if only a bound of the keys reads them. An axis
                ``b``, ``h``, ``i`` or ``j`` of the option ``parameters`` has B, H or Nk entries.
            scale: factor of q k^T, default ``D ** -0.5``.
            dropout_p: probability that a factor of v is dropped, 0 <= p < 1, rounded to a multiple
                of 2**-15; the others are divided by 1 - p. A value above 0 needs an op built with
                ``dropout=True``. Use it in training only: ``dropout_p=p if self.training else 0``.
            dropout_seed: ``(2,)`` int64 on q's device, which decides the factors that are dropped
                (:func:`mtagen.dropout_mask` says which are kept); by default each call draws a seed from
                torch's generator (:func:`mtagen.draw_seed`).
            return_lse: also return the log-sum-exp of each row of the scores that the softmax
                takes, ``(B, H, Nq)`` fp32, or fp64 if q is.

        Returns:
            ``(B, H, Nq, DV)`` in q's dtype. Rows that see no key are 0 with a log-sum-exp of -inf. Under
            ``torch.autocast`` q, k and v are cast to its dtype first.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
        """
        q, k, v = autocast(q, k, v)
        given = (weight, head_weight, post_weight, post_head_weight)
        weights = check_call(self._spec, self.dtypes, q, k, v, given)
        factors = (query_factors, key_factors, post_query_factors, post_key_factors)
        weights += check_slots(self._spec, q, k, sink, parameters, factors=factors)
        scale = resolve_scale(scale, self._spec.head_dim)
        if dropout_p == 0 and dropout_seed is None:
            out, lse, *_ = library.run("forward", q, k, v, *weights, scale, self._key)
        else:
            dropout = None, None, 0, 0, self._seed(q, dropout_p, dropout_seed), float(dropout_p)  # no documents
            out, lse, *_ = library.run("forward", q, k, v, *weights, scale, self._key, *dropout)
        return (out, lse) if return_lse else out

    @overload
    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_VarlenOptions],
    ) -> Tensor: ...
    @overload
    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[_VarlenOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: bool,
        **options: Unpack[_VarlenOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
        sink: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        scale: float | None = None,
        dropout_p: float = 0,  # torch.compile would make a symbol of a float, and compile twice
        dropout_seed: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the op on packed documents, each of which is a sequence of its own.

        Arguments are those of torch's ``varlen_attn``. An op that was built without ``packed=True``
        builds its kernels for packed documents in the first call.

        Args:
            q: ``(total_q, H, D)``, the queries of all documents, one document after another. Any
                strides, the last 1.
            k: ``(total_k, Hkv, D)``.
            v: ``(total_k, Hkv, DV)``.
            weight, head_weight, post_weight, post_head_weight, sink, scale: as in a call of the op.
            parameters: as in a call of the op. A document counts as a batch entry. Parameters of
                tokens are ``(total_k, ...)``: their tokens come first, and the axis ``b`` is left
                out.
            cu_seq_q: ``(documents + 1,)`` int32 on q's device: where each document's queries begin,
                the first at 0, and where the last document ends. Rows after that end are padding
                and may hold anything. Documents may be empty, and may have more or fewer queries
                than keys. mtagen does not check the values on a GPU, because reading them would
                force a synchronisation.
            cu_seq_k: the same for keys.
            max_q: queries of the longest document, or more. Memory may grow with ``max_q``, time
                does not.
            max_k: keys of the longest document, or more.
            dropout_p, dropout_seed: as in a call of the op; a document counts as a batch entry.
            return_lse: also return the log-sum-exps, ``(H, total_q)`` fp32.

        Returns:
            ``(total_q, H, DV)`` in q's dtype. Rows that see no key, and rows after the last
            document, are 0 and have log-sum-exps of -inf. Gradients of rows after the last document
            are 0.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
            PlanError: no backend has kernels of this op for packed documents.
            SpecError: a mixing of the op depends on tokens.
        """
        q, k, v = autocast(q, k, v)
        given = (weight, head_weight, post_weight, post_head_weight)
        weights = check_varlen(self._spec, self.dtypes, q, k, v, given, Documents(cu_seq_q, cu_seq_k, max_q, max_k))
        weights += check_slots(self._spec, q, k, sink, parameters, cu_seq_q.shape[0] - 1)
        seed = None if dropout_p == 0 and dropout_seed is None else self._seed(q, dropout_p, dropout_seed)
        scale = resolve_scale(scale, self._spec.head_dim)
        documents = cu_seq_q, cu_seq_k, max_q, max_k
        out, lse, *_ = library.run("forward", q, k, v, *weights, scale, self._key, *documents, seed, float(dropout_p))
        return (out, lse) if return_lse else out

    def identity_weights(
        self, heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Return weights with which each stage passes on what it gets, as training starts from.

        ``op(q, k, v, **op.identity_weights(heads))`` is plain attention. ``torch.nn.ParameterDict`` of the result holds
        the weights as parameters of a module, and takes the same stars.

        Args:
            heads: H, heads of queries.
            device: of the weights, default PyTorch's.
            dtype: of the weights: fp32, in which they are best trained, or that of q.

        Returns:
            The weights of the op's stages by the names of its arguments: convolutions ``(H, cq, ck)``, 1 at a score's
            own place and 0 elsewhere; mixtures ``(H/m, m, m)``, each matrix the identity.

        Raises:
            InputError: ``heads`` is not a positive int, or cannot be divided into groups that are mixed.
        """
        weights = {}
        for name, shape in self._spec.weights(check_heads(self._spec, heads)).items():
            if name in self._spec.mixed:
                weights[name] = torch.eye(shape[-1], device=device, dtype=dtype).repeat(shape[0], 1, 1)
            else:
                weights[name] = torch.zeros(shape, device=device, dtype=dtype)
                weights[name][:, -1, self._spec.padding(shape[-1])[0]] = 1
        return weights

    def _seed(self, q: Tensor, p: float, seed: Tensor | None) -> Tensor:
        """Return the dropout seed of a call, drawn if the caller passed none.

        Raises:
            InputError: the op was built without dropout, or an argument does not fit.
        """
        if not self._drops:
            rule = "this op was built without dropout"
            raise InputError(explain("dropout_p", p, rule, "0, or mtagen.build(..., dropout=True)"))
        check_dropout_p(p)
        if seed is None:
            return draw_seed(q.device)
        check_seed(seed, q.device)
        return seed

    @overload
    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_DecodeOptions],
    ) -> Tensor: ...
    @overload
    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[_DecodeOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: bool,
        **options: Unpack[_DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
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
        query_factors: Tensor | None = None,
        key_factors: Tensor | None = None,
        post_query_factors: Tensor | None = None,
        post_key_factors: Tensor | None = None,
        sink: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        cache_seqlens: Tensor | None = None,
        scale: float | None = None,
        num_splits: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the last rows of the op: 1..8 new queries against a cache of keys and values.

        Args:
            q_tail: ``(B, H, context + n_new, D)``: the earlier queries that the new ones depend on
                (cq - 1 for each convolution), then the new queries. Rows at positions before the
                sequence's start count as zero, whatever they hold.
            k_cache: ``(B, Hkv, N, D)``, the new tokens' keys included.
            v_cache: ``(B, Hkv, N, DV)``.
            weight, head_weight, post_weight, post_head_weight, sink: as in the op.
            query_factors, post_query_factors: as in the op, of the rows of ``q_tail``.
            key_factors, post_key_factors: as in the op, ``(B, H, N, 2 R + 1)``.
            parameters: as in the op; those of tokens have N entries, as the cache has.
            cache_seqlens: ``(B,)`` int32, keys in use per batch entry (0..N; a larger number counts
                as N), default N. Later keys are ignored, whatever they hold.
            scale: as in the op.
            num_splits: number of parts that the keys are split into (flash decoding); planned by
                default.
            return_lse: also return ``(B, H, n_new)`` log-sum-exps.

        Returns:
            ``(B, H, n_new, DV)`` in q_tail's dtype; not differentiable.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
        """
        q_tail, k_cache, v_cache = autocast(q_tail, k_cache, v_cache)
        given = (weight, head_weight, post_weight, post_head_weight)
        weights = check_decode(self._spec, self.dtypes, q_tail, k_cache, v_cache, given, cache_seqlens, num_splits)
        factors = (query_factors, key_factors, post_query_factors, post_key_factors)
        weights += check_slots(self._spec, q_tail, k_cache, sink, parameters, factors=factors)
        out, lse = library.run(
            "decode",
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

    @overload
    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_PagedOptions],
    ) -> Tensor: ...
    @overload
    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[_PagedOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        weight: Tensor | None = None,
        *,
        return_lse: bool,
        **options: Unpack[_PagedOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        weight: Tensor | None = None,
        *,
        block_table: Tensor,
        cu_seq_q: Tensor | None,
        lengths: Tensor,
        max_q: int,
        max_k: int,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
        sink: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        scale: float | None = None,
        num_splits: int | None = None,
        decode_threshold: int = MAX_NEW_TOKENS,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the new queries of several requests, whose keys and values lie in pages.

        A request may have any number of new queries: a chunk of a prompt, or one token, or none.
        The kernels of :meth:`decode` compute requests with at most ``decode_threshold`` new queries,
        and those of :meth:`varlen` all others; the device decides. Both read keys from the pages. PyTorch's
        ops, and fused kernels that place values side by side, take copies of the keys.
        :class:`mtagen.serving.Rings` keeps the earlier queries.

        Args:
            q: ``(total, H, D)``, the requests' rows one request after another: the ``context``
                queries before its new ones (cq - 1 for each convolution), then the new ones. Rows
                before a request's start count as zero, whatever they hold.
            k_pages: ``(pages, size, Hkv, D)``, the new tokens' keys included. Any strides, the last
                one 1. ``size`` is a power of two, on a GPU 16 or more. Slots that hold no token of
                a request may be NaN.
            v_pages: ``(pages, size, Hkv, DV)``.
            weight, head_weight, post_weight, post_head_weight, sink, scale: as in a call of the op.
            parameters: as in a call of the op, without axes of tokens. A request counts as a batch
                entry.
            block_table: ``(requests, width)`` int32 on q's device: the pages of each request in
                order. Entries after its last page may hold anything.
            cu_seq_q: ``(requests + 1,)`` int32, where each request's rows begin, and where the last
                request ends. Rows after that end are padding. None: each request has ``max_q`` rows.
            lengths: ``(requests,)`` int32, keys of each request; 0 marks an unused entry.
            max_q: rows of the longest request, or more.
            max_k: keys of the longest request, or more. On a GPU copies of keys, where a kernel needs
                them, have room for ``max_k`` keys of each request.
            num_splits: parts into which the kernels of decode split the keys, 1, 2, ...; planned from
                ``max_k`` and the number of requests by default. If it is given, no other request
                changes a bit of a request's results, as long as ``max_k`` and ``decode_threshold``
                stay the same.
            decode_threshold: the most new queries of a request that the kernels of decode compute,
                1..8. If another request has more, or ``num_splits`` is given, these kernels compute
                ``decode_threshold`` rows of each request. With 1, steps of single tokens beside chunks
                are faster.
            return_lse: also return the log-sum-exps, ``(H, total - requests * context)`` fp32.

        Returns:
            ``(total - requests * context, H, DV)`` in q's dtype, the rows of the new queries; not
            differentiable.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            BackendError: the tensors are on a device this op was not built for.
            PlanError: no backend has kernels of this op for packed documents.
            SpecError: a mixing of the op depends on tokens.
        """
        q, k_pages, v_pages = autocast(q, k_pages, v_pages)
        given = (weight, head_weight, post_weight, post_head_weight)
        pages = Pages(block_table, cu_seq_q, lengths, max_q, max_k)
        weights = check_paged(self._spec, self.dtypes, q, k_pages, v_pages, given, sink, parameters, pages)
        scale = resolve_scale(scale, self._spec.head_dim)
        check_splits(num_splits, len(lengths) * q.shape[1] * MAX_NEW_TOKENS)
        check_threshold(decode_threshold)
        context, requests = self._spec.context, len(lengths)
        routes = Routes.of(pages, context, decode_threshold, num_splits is not None)
        tensors = (k_pages.transpose(1, 2), v_pages.transpose(1, 2), *weights)
        chunks = steps = None
        if routes.chunks is not None:
            others = *routes.chunks, None, 0.0, block_table  # without dropout
            chunks = library.run("forward", q, *tensors, scale, self._key, *others)
            if routes.steps is None and not (context and requests):
                return (chunks[0], chunks[1]) if return_lse else chunks[0]
        if routes.steps is not None:
            boundaries, rows = routes.steps.cu_seq_q, routes.steps.max_q
            tails = q.view(-1, rows, *q.shape[1:]) if boundaries is None else last_rows(q, boundaries, rows)
            step = routes.steps.lengths, scale, num_splits or 0, self._key, block_table, max_k
            steps = library.run("decode", tails.transpose(1, 2), *tensors, *step)
            if boundaries is None:  # each row of the steps is a result
                out, lse = steps[0].transpose(1, 2).flatten(0, 1), steps[1].transpose(0, 1).flatten(1)
                return (out, lse) if return_lse else out
        given = (*(chunks or (None, None)), *(steps or (None, None)), pages.boundaries)
        out, lse = merge(Results._make((*given, len(q) - requests * context, context)))
        return (out, lse) if return_lse else out


def assemble(
    planned: Plan,
    *,
    torch_on_cpu: bool = True,
    dtype: DType | None = None,
    deterministic: bool | None = None,
    packed: bool = False,
    dropout: bool = False,
    page_size: int | None = None,
    plan_like: Callable[[Spec], Plan] | None = None,
    build_again: Callable[[], AttentionOp] | None = None,
) -> AttentionOp:
    """Compile the kernels of a plan and make its op.

    Args:
        planned: the plan.
        torch_on_cpu: whether tiled PyTorch ops serve tensors on the CPU.
        dtype: the only dtype that the op takes; default the plan's, or any dtype if PyTorch
            computes all passes.
        deterministic: as in :func:`mtagen.build`.
        packed: whether kernels for packed documents are compiled, too.
        dropout: whether calls may pass ``dropout_p``; kernels with dropout are then compiled, too.
        page_size: tokens of a page, if kernels for pages are compiled, too.
        plan_like: plans the spec with packed documents, or dropout, or both; by default for the plan's backend.
        build_again: a picklable call that makes the same op in another process; without it the op
            cannot be pickled.

    Raises:
        BackendError: the plan's backend cannot be used here.
        InputError: kernels cannot read pages of this size.
        PlanError: kernels for packed documents or dropout were asked for, and no backend has them.
    """
    spec, interpreted, generated = planned.spec, Config.from_env().triton_interpret, planned.backend != "torch"
    if interpreted and spec.dtype == "bf16" and planned.triton:
        rule = "Triton's interpreter computes bf16 wrongly"
        raise BackendError(explain("dtype", "bf16", rule, "fp32 or fp16, or a GPU"))
    if page_size:
        check_page_size(page_size, "cuda" if generated and not interpreted else "cpu")
    backend = planned.backend if planned.backend in BACKENDS else "auto"
    variants = _Variants(spec, plan_like or partial(plan, target=planned.target, backend=backend))
    sources = render(planned)
    executor = Executor(
        spec,
        _passes(planned, sources) if generated else None,
        kernels_on_cpu=generated and interpreted,
        torch_on_cpu=torch_on_cpu,
        deterministic=deterministic,
        variants=variants,
    )
    for variant in product((False, True)[: packed + 1], (False, True)[: dropout + 1]):
        if generated and any(variant):
            variants(*variant, None)
    for chunks in (False, True) if generated and page_size else ():
        variants(chunks, False, page_size)
    key = f"{plan_key(planned, sources)}-torch_on_cpu{torch_on_cpu:d}-deterministic{deterministic}"
    library.register(key, executor)
    fixed = dtype or (spec.dtype if generated else None)
    dtypes = (TORCH_DTYPES[fixed],) if fixed else tuple(TORCH_DTYPES.values())
    return AttentionOp(planned, key, dtypes, dropout, build_again)


class _Variants:
    """Passes of a spec with packed documents, dropout, both, or pages, each built on first use."""

    def __init__(self, spec: Spec, plan_like: Callable[[Spec], Plan]) -> None:
        self._spec, self._plan_like = spec, plan_like
        self._lock = threading.Lock()
        self._built: dict[tuple[bool, bool, int | None], Passes] = {}

    def __call__(self, packed: bool, dropout: bool, page_size: int | None) -> Passes:
        with self._lock:
            return self._passes_of(packed, dropout, page_size)

    def _passes_of(self, packed: bool, dropout: bool, page_size: int | None) -> Passes:
        key = packed, dropout, page_size
        if key not in self._built:
            self._built[key] = self._build(*key)
        return self._built[key]

    def _build(self, packed: bool, dropout: bool, page_size: int | None) -> Passes:
        """Build passes; those of packed documents without pages if no kernel reads their keys from pages."""
        spec = replace(self._spec, packed=packed, dropout=dropout, page_size=page_size)
        try:
            planned = self._plan_like(spec)
        except PlanError:
            if not (packed and page_size):
                raise
            return self._passes_of(packed, dropout, None)
        return _passes(planned, render(planned))


def _passes(planned: Plan, sources: Sources) -> Passes:
    if not Config.from_env().triton_interpret:
        compile_kernels(planned, sources)
    return load(planned, sources)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast q, k and v to the dtype of ``torch.autocast`` where it is on. Weights are not cast."""
    if not torch._C._is_any_autocast_enabled():  # takes half the time of the queries below
        return tensors
    dtype = autocast_dtype(tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu")
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if isinstance(x, Tensor) and _is_castable(x) else x for x in tensors)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on devices of a type; None if autocast is off there."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # the query raises for meta tensors
        return None
    return torch.get_autocast_dtype(device_type)


def _is_castable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # like PyTorch's own ops, which leave fp64 alone
