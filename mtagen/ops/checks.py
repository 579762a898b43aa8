"""Checks of a call's arguments, made before any launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ..arguments import Named, check_batch, check_dense, check_groups, check_learned, shaped_weight
from ..call import NO_LEARNED, Documents
from ..config import Config
from ..dtypes import TORCH_DTYPES
from ..errors import InputError, explain
from ..planner.targets import GRID_X
from ..spec import FACTORS, MAX_NEW_TOKENS, SINK, STAGES, WEIGHTS, Spec, as_int

MAX_SPLITS = 2**16 - 1  # upper limit, because each split writes a partial result


def check_call(
    spec: Spec, dtypes: tuple[torch.dtype, ...], q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Check q (B, H, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, DV) and the weights before a call.

    Args:
        weights: a weight for each name in ``mtagen.spec.WEIGHTS``, in that order; None for stages
            that the spec lacks.

    Returns:
        The weights in the same order, in the shapes of :meth:`Spec.weights`.

    Raises:
        InputError: some argument does not fit the spec or another argument.
    """
    return _checked(spec, dtypes, (("q", q), ("k", k), ("v", v)), weights)


def check_decode(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor | None],
    cache_seqlens: Tensor | None,
    num_splits: int | None,
) -> list[Tensor | None]:
    """Check a decode step: q_tail (B, H, n_new + context, D), caches (B, Hkv, N, ...).

    Raises:
        InputError: some argument does not fit.
    """
    tensors = (("q_tail", q_tail), ("k_cache", k_cache), ("v_cache", v_cache))
    checked = _checked(spec, dtypes, tensors, weights)
    rows, context = q_tail.shape[2], spec.context
    if not 1 <= rows - context <= MAX_NEW_TOKENS:
        sum_of = " + ".join(name for name, used in (("cq - 1", spec.kernel), ("post cq - 1", spec.post_kernel)) if used)
        earlier = f"{context} context queries ({sum_of} = {context}), then " if context else ""
        raise InputError(
            explain(
                "q_tail rows",
                rows,
                f"must be {earlier}1..{MAX_NEW_TOKENS} new queries",
                f"{context + 1}..{context + MAX_NEW_TOKENS}",
            )
        )
    if cache_seqlens is not None:
        check_dense((("cache_seqlens", cache_seqlens),))
        got = (tuple(cache_seqlens.shape), cache_seqlens.dtype, cache_seqlens.device)
        if got != ((q_tail.shape[0],), torch.int32, q_tail.device):
            legal = f"shape ({q_tail.shape[0]},), torch.int32, {q_tail.device}"
            raise InputError(
                explain("cache_seqlens", got, "must be one length per batch entry, on q_tail's device", legal)
            )
    check_splits(num_splits, q_tail.shape[0] * q_tail.shape[1] * (rows - context))
    return checked


def check_splits(num_splits: int | None, outputs: int) -> None:
    """Check the number of parts into which the keys of a step are split, for ``outputs`` rows of outputs.

    Raises:
        InputError: it is not a positive int, or too large.
    """
    if num_splits is None:
        return
    is_int = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    if not (is_int and 1 <= num_splits <= MAX_SPLITS):
        legal = f"1, 2, ... or None to plan it; at most {MAX_SPLITS}"
        raise InputError(explain("num_splits", num_splits, "must be a positive int", legal))
    if outputs * num_splits > GRID_X:
        limit = f"{outputs} rows of outputs have this many partial results each, and {GRID_X} in all is the limit"
        raise InputError(explain("num_splits", num_splits, limit, f"{GRID_X // outputs} or less, or None"))


def check_heads(spec: Spec, heads: int) -> int:
    """``heads``, if an op can have this number of heads of queries.

    Raises:
        InputError: it is not a positive int, or cannot be divided into groups that are mixed.
    """
    count = as_int(heads)
    if count is None or count < 1:
        raise InputError(explain("heads", heads, "must be a positive int", "1, 2, ..."))
    for name, mixed in spec.mixed.items():
        check_groups(name, count, mixed)
    return count


def check_varlen(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor | None],
    documents: Documents,
) -> list[Tensor | None]:
    """Check a call on packed documents like :func:`check_call`.

    The shapes are q (total_q, H, D), k (total_k, Hkv, D) and v (total_k, Hkv, DV).

    Raises:
        InputError: some argument does not fit. The values in cu_seq_q and cu_seq_k are checked if
            :func:`may_read`, and with them whether a document is longer than max_q or max_k.
    """
    checked = check_packed(spec, dtypes, q, k, v, weights)
    check_documents(documents, q.shape[0], k.shape[0], q.device)
    return checked


def check_packed(
    spec: Spec, dtypes: tuple[torch.dtype, ...], q: Tensor, k: Tensor, v: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Check rows of packed documents: q (n_q, H, D), k (n_k, Hkv, D) and v (n_k, Hkv, DV).

    Raises:
        InputError: some argument does not fit.
    """
    return _checked(spec, dtypes, (("q", q), ("k", k), ("v", v)), weights, packed=True)


def check_documents(documents: Documents, total_q: int, total_k: int, device: torch.device) -> None:
    """Check the boundaries of packed documents that have ``total_q`` queries and ``total_k`` keys.

    Raises:
        InputError: some value does not fit. The values in cu_seq_q and cu_seq_k are checked if
            :func:`may_read`, and with them whether a document is longer than max_q or max_k.
    """
    cu_seq_q, cu_seq_k, max_q, max_k = documents
    check_boundaries(("cu_seq_q", cu_seq_q), ("max_q", max_q), total_q, device)
    check_boundaries(("cu_seq_k", cu_seq_k), ("max_k", max_k), total_k, device)
    if cu_seq_q.shape != cu_seq_k.shape:
        counts = len(cu_seq_q) - 1, len(cu_seq_k) - 1
        rule = "cu_seq_q and cu_seq_k must have the same number of documents"
        raise InputError(explain("documents", counts, rule, "two tensors of the same length; documents may be empty"))


def is_length(value: object) -> bool:
    """Return whether a value is a number of rows, as callers or ``torch.compile`` pass it."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) and bool(value >= 0)


@cache
def _waits_for_gpus() -> bool:
    return Config.from_env().check_values


def may_read(x: Tensor) -> bool:
    """Return whether checks may read what a tensor holds.

    Checks of tensors on a GPU would wait for it, which ``MTAGEN_CHECK_VALUES=1`` allows. Traced calls, and
    those that a CUDA graph captures, have no values to check.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    return x.is_cpu or (x.is_cuda and _waits_for_gpus() and not torch.cuda.is_current_stream_capturing())


def check_boundaries(
    boundaries: tuple[str, Tensor], longest: tuple[str, int], total: int, device: torch.device
) -> None:
    """Check where packed documents begin and end.

    Args:
        boundaries: ``(documents + 1,)`` int32, and what the caller calls it.
        longest: rows of the longest document, or more, and what the caller calls it.
        total: rows.
        device: where the boundaries must be.

    Raises:
        InputError: some value does not fit. The boundaries are read only if :func:`may_read` allows it.
    """
    (name, cu_seq), (longest_name, most) = boundaries, longest
    if not is_length(most):
        rule = "must be the length of the longest document"
        raise InputError(explain(longest_name, most, rule, "an int, 0, 1, 2, ..."))
    check_dense([(name, cu_seq)])
    got = (cu_seq.ndim, cu_seq.dtype, cu_seq.device)
    if got != (1, torch.int32, device) or cu_seq.shape[0] == 0:
        rule = "must hold where each document begins, and the end of the last"
        got_shape = (tuple(cu_seq.shape), *got[1:])
        raise InputError(explain(name, got_shape, rule, f"shape (documents + 1,), torch.int32, {device}"))
    if not may_read(cu_seq):
        return
    values = cu_seq.tolist()
    lengths = "torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) of the documents' lengths"
    if values[0] != 0:
        raise InputError(explain(name, values, "must begin with 0, where the first document does", lengths))
    if values != sorted(values):
        rule = "must not decrease, because each document begins where the one before it ends"
        raise InputError(explain(name, values, rule, lengths))
    if values[-1] > total:
        rule = f"must not exceed the number of rows, {total}"
        raise InputError(explain(name, values, rule, f"{total} or less as its last value"))
    needed = max((end - begin for begin, end in pairwise(values)), default=0)
    if most < needed:
        rule = "must be the length of the longest document"
        raise InputError(explain(longest_name, most, rule, f"{needed} or more"))


def _checked(
    spec: Spec,
    dtypes: tuple[torch.dtype, ...],
    tensors: Named,
    weights: Sequence[Tensor | None],
    *,
    packed: bool = False,
) -> list[Tensor | None]:
    check_dense(tensors)
    name, q = tensors[0]
    if q.dtype not in dtypes:
        rule, legal = "this op was not built for this dtype", " or ".join(map(str, dtypes))
        other = f"; or mtagen.build(..., dtype={q.dtype})" if q.dtype in TORCH_DTYPES.values() else ""
        raise InputError(explain(f"{name}.dtype", q.dtype, rule, f"{legal}{other}"))
    check_batch(tensors, (spec.head_dim, spec.value_head_dim), packed=packed)
    for name, x in tensors:
        if x.stride()[-1] != 1 and x.shape[-1] > 1:
            legal = f"{name}.contiguous()"
            raise InputError(explain(f"{name}.stride()", tuple(x.stride()), "the last stride must be 1", legal))
    needed = spec.weight_names
    return [
        None if weight is None and name not in needed else _checked_weight(spec, tensors[0], name, weight)
        for name, weight in zip(WEIGHTS, weights, strict=True)
    ]


def check_slots(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    sink: Tensor | None,
    parameters: Mapping[str, Tensor] | None,
    documents: int = 0,
    factors: Sequence[Tensor | None] = (None,) * len(FACTORS),
) -> list[Tensor | None]:
    """Check the factors, the sink and the parameters of a call, and return them as registered ops take them.

    Args:
        spec: the operator of batches.
        q, k: the queries and keys, which have been checked.
        sink, parameters: as they were passed.
        documents: number of packed documents, if q has three dimensions.
        factors: a tensor for each name in ``mtagen.spec.FACTORS``, as they were passed.

    Raises:
        InputError: a tensor does not fit, was not asked for, or is missing.
        SpecError: packed documents cannot have a parameter, or factors.
    """
    given_factors = {name: x for name, x in zip(FACTORS, factors, strict=True) if x is not None}
    if not (spec.learned_arguments or sink is not None or parameters or given_factors):
        return [*NO_LEARNED]
    if q.ndim == 3:
        arguments = spec.packed_learned_arguments
        sizes = {"documents": documents, "H": q.shape[1], "total_k": k.shape[0]}
    else:
        sizes = {"B": q.shape[0], "H": q.shape[1], "Nq": q.shape[2], "Nk": k.shape[2]}
        arguments = spec.learned_arguments
    checked = check_learned(arguments, sizes, q, sink, parameters, given_factors)
    first_parameter = len(checked) - len(spec.parameters)
    named = {argument.name: x for argument, x in zip(arguments[:first_parameter], checked, strict=False)}
    slots = [*(named.get(name) for name in (*FACTORS, SINK.name)), *checked[first_parameter:]]
    return slots + [None] * (len(NO_LEARNED) - len(slots))


def check_constants(spec: Spec, inputs: Sequence[Tensor | None]) -> None:
    """Check that no constant requires a gradient.

    Args:
        spec: the op.
        inputs: the tensors of a call, in the order of :class:`mtagen.call.Call`.

    Raises:
        InputError: one does.
    """
    if not spec.constants:
        return
    given = (x for x in inputs[-len(NO_LEARNED) :] if x is not None)
    for argument, x in zip(spec.learned_arguments, given, strict=False):  # ranks have more arguments than a call gives
        if argument.name in spec.constants and x.requires_grad:
            told = f"parameters[{argument.name!r}]"
            rule = "the op computes no gradient for it, because it was built with this name in constants"
            legal = f"{told}.detach(), or an op without this constant"
            raise InputError(explain(f"{told}.requires_grad", True, rule, legal))


def _checked_weight(spec: Spec, queries: tuple[str, Tensor], name: str, weight: Tensor | None) -> Tensor:
    """Check a weight that the spec needs or the caller passed, and return it in its shape."""
    if name not in spec.weight_names:
        told, got = (f"{name}.shape", tuple(weight.shape)) if isinstance(weight, Tensor) else (name, weight)
        rule = "this op was built without such a stage"
        raise InputError(explain(told, got, rule, f"None, or mtagen.build(..., {STAGES[name]}=...)"))
    heads = queries[1].shape[1]
    shape = spec.weight_shape(name, heads)
    if weight is None:
        rule = f"this op was built with {STAGES[name]}={getattr(spec, STAGES[name])}, so each call needs its weight"
        raise InputError(explain(name, weight, rule, f"shape {shape}, such as op.identity_weights({heads})['{name}']"))
    return shaped_weight(queries, name, weight, spec.mixed.get(name), shape)


def is_aligned(x: Tensor) -> bool:
    """Return whether rows start at multiples of 16 bytes and share no memory (bulk copies)."""
    if x.data_ptr() % 16:
        return False
    if x.is_contiguous():  # a row of any head dim that a spec can have is a multiple of 16 bytes
        return True
    *strides, last = x.stride()
    vector = 16 // x.element_size()
    for size, stride in zip(x.shape, strides, strict=False):
        if size > 1 and (stride <= 0 or stride % vector):
            return False
    return last == 1
