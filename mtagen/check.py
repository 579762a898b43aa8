"""Check a built op against :func:`mtagen.reference` by the rule of :mod:`.accuracy`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .accuracy import Comparison
from .dropout import draw_seed, dropout_mask
from .dtypes import TORCH_DTYPES
from .errors import SpecError, explain
from .measure.cases import Sizes
from .measure.inputs import Inputs, Sampler
from .measure.judge import documents_op, eager_op, judge, judge_decode
from .spec import Spec

SIZES = (
    Sizes(8, 8, 4, 1, 1),  # enough rows that eager is not exact by luck
    Sizes(2, 2, 2, 67, 67),
    Sizes(2, 4, 2, 113, 203),  # ragged, grouped queries
    Sizes(1, 2, 1, 70, 9),  # when causal, most queries see no key
    Sizes(1, 2, 1, 511, 515),  # many tiles
)

DROPOUT_P = 0.2
_MIN_ENTRIES = 16  # a weight's gradient needs this many entries, or eager's largest error may be small by luck
# Sinks and parameters need more entries. With 16, eager's largest error was by chance only a fifth of ours in one of
# 36 draws (on average: twice ours).
_MIN_SUMS = 32


class Op(Protocol):
    """The methods of a built op that the checks call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def varlen(self, *args: Any, **kwargs: Any) -> Any: ...

    def decode(self, *args: Any, **kwargs: Any) -> Any: ...


class Row(NamedTuple):
    """One result at one size, judged."""

    sizes: Sizes
    result: str
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict. Errors that are not finite are None, which JSON can say."""
        errors = {name: x if math.isfinite(x) else None for name, x in asdict(self.comparison).items()}
        return {**self.sizes._asdict(), "result": self.result, **errors, "ok": self.comparison.ok}


def check(op: Op, spec: Spec, device: torch.device, sizes: Sequence[Sizes] = SIZES) -> Iterator[Row]:
    """Judge the forward pass, all gradients and decode of ``op`` on random inputs, size by size.

    Specs with small weights are checked with more heads than ``sizes`` say. If the spec is packed,
    the sequences of each batch become documents. Specs with parameters of pairs of tokens are checked
    with the sizes that have at least as many keys as queries.

    Raises:
        SpecError: the dtype is as wide as the float64 reference's.
    """
    if spec.dtype == "fp64":
        legal = [name for name in TORCH_DTYPES if name != "fp64"]
        raise SpecError(explain("dtype", spec.dtype, "must be narrower than the float64 reference", legal))
    has_pairs = any(x.counts_pairs for x in spec.learned_arguments)
    for requested in sizes:
        if has_pairs and requested.nq > requested.nk:
            continue
        enough = _with_enough_entries(spec, requested)
        sampler = Sampler.for_checks(spec, enough, device)
        inputs, grad_out, new_tokens = sampler.inputs(), sampler.outputs(), min(2, requested.nk)
        factors = sampler.query_factors(new_tokens, decode=True)
        to_decode = replace(inputs, q=sampler.queries(new_tokens, decode=True), weights={**inputs.weights, **factors})
        # With TF32, eager convolutions in fp32 would err too much to judge others by.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            judged = _judge_packed if spec.packed else _judge_batch
            results = judged(op, spec, inputs, grad_out)
            results |= judge_decode(op.decode, eager_op(spec, return_lse=True), to_decode, new_tokens)
        for name, comparison in results.items():
            yield Row(enough, name, comparison)


def _judge_batch(op: Op, spec: Spec, inputs: Inputs, grad_out: Tensor) -> dict[str, Comparison]:
    batch, heads, nq, _ = inputs.q.shape
    options, eager_options = _dropout(spec, inputs.q.device, Sizes(batch, heads, heads, nq, inputs.k.shape[2]))
    eager = partial(eager_op(spec, return_lse=True), **eager_options)
    return judge(partial(op, **options, return_lse=True), eager, inputs, grad_out)


def _judge_packed(op: Op, spec: Spec, inputs: Inputs, grad_out: Tensor) -> dict[str, Comparison]:
    """Judge the op on packed documents of decreasing lengths, one of them empty."""
    (batch, heads, nq, _), nk = inputs.q.shape, inputs.k.shape[2]
    all_q = [nq, 0, *(max(1, nq - 2 * b) for b in range(1, batch))]
    all_k = [nk, min(nk, 3), *(max(1, nk - 3 * b) for b in range(1, batch))]

    def packed(x: Tensor, lengths: list[int]) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).repeat(2, 1, 1)[: sum(lengths)]

    def repeated(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        numel = math.prod(shape)
        return x.flatten().repeat(math.ceil(numel / x.numel()))[:numel].view(shape)

    sizes = {"documents": len(all_q), "H": heads, "total_k": sum(all_k)}
    # The same numbers as those of the batch, repeated.
    parameters = {
        x.name: repeated(inputs.parameters[x.name], x.extents(sizes))
        for x in spec.learned_arguments
        if x.name in inputs.parameters
    }
    documents = replace(
        inputs, q=packed(inputs.q, all_q), k=packed(inputs.k, all_k), v=packed(inputs.v, all_k), parameters=parameters
    )
    device = inputs.q.device
    cu_seq_q, cu_seq_k = (torch.tensor([0, *n], device=device).cumsum(0).to(torch.int32) for n in (all_q, all_k))
    options, eager_options = _dropout(spec, device, Sizes(len(all_q), heads, heads, nq, nk))

    def eager(*tensors: Tensor, document: int, **weights: Tensor) -> Any:
        options_of_document = dict(eager_options)
        if eager_options:
            mask = eager_options["dropout_mask"][document : document + 1]
            options_of_document["dropout_mask"] = mask[:, :, : all_q[document], : all_k[document]]
        return eager_op(spec, return_lse=True)(*tensors, **weights, **options_of_document)

    varlen = partial(op.varlen, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=nq, max_k=nk, **options, return_lse=True)
    return judge(varlen, documents_op(eager, all_q, all_k, inputs.axes), documents, packed(grad_out, all_q))


def _dropout(spec: Spec, device: torch.device, sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dropout options of the op and of eager PyTorch, empty without dropout."""
    if not spec.dropout:
        return {}, {}
    seed = draw_seed(device)
    mask = dropout_mask(seed, DROPOUT_P, sizes.batch, sizes.heads, sizes.nq, sizes.nk)
    return {"dropout_p": DROPOUT_P, "dropout_seed": seed}, {"dropout_p": DROPOUT_P, "dropout_mask": mask}


def failures(op: Op, spec: Spec, device: torch.device, sizes: Sequence[Sizes] = SIZES) -> list[str]:
    """Return one line for each result of :func:`check` that breaks the accuracy rule."""
    return [
        f"{row.sizes} {row.result}: {row.comparison.error:.3g} > {row.comparison.allowed:.3g}"
        for row in check(op, spec, device, sizes)
        if not row.comparison.ok
    ]


def _with_enough_entries(spec: Spec, sizes: Sizes) -> Sizes:
    """Return ``sizes`` with heads enough for the mixed groups and for ``_MIN_ENTRIES``."""
    times = math.lcm(*(mixed // math.gcd(mixed, sizes.heads) for mixed in spec.mixed.values()))
    heads = times * sizes.heads
    entries = [math.prod(shape) for shape in spec.weights(heads).values()]
    extents = {"B": sizes.batch, "documents": sizes.batch, "H": heads, "Nq": sizes.nq, "Nk": sizes.nk}
    extents["total_k"] = sizes.nk
    sums = [math.prod(x.extents(extents)) for x in spec.learned_arguments if "H" in x.shape]
    of_sums = _MIN_SUMS / min(sums, default=_MIN_SUMS)
    times *= math.ceil(max(of_sums, _MIN_ENTRIES / min(entries, default=_MIN_ENTRIES)))
    return sizes._replace(heads=times * sizes.heads, kv_heads=times * sizes.kv_heads)
