"""Problems that random inputs hardly ever pose, and an op's results on them by the rule of :mod:`mtagen.accuracy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mtagen
from mtagen.accuracy import Comparison, compare
from mtagen.dropout import dropout_mask
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Inputs, Sampler
from mtagen.measure.judge import eager_op, judge
from mtagen.spec import Spec

LARGEST_PRODUCT = 1.55e7  # of a query and a key; docs/limits.md promises 1.6e7
NEW_TOKENS = 2

# Logits that depend on all places, bend within the range of random scores, and are largest at other keys than scores.
LOGITS = "(3 + h) * tanh(s / 2) - (i - j) / 16"
# Where a later key is hidden, they and their slope are NaN.
DEFINED_WHERE_VISIBLE = "s * log(i - j + 2)"
# They depend on where keys lie in the sequence, not only on distances.
OF_PLACES = "s * log(i + 2) / 4 + sqrt(j + 1) / 4"
# They read numbers of heads, of distances, and of rows and keys.
READ = {
    "logits": "s - slopes[h] * (i - j) / 16 + table[h, max(0, min(8, i - j))] + gates[b, h, i] - gates[b, h, j]",
    "parameters": {"slopes": "h", "table": "h,9", "gates": "b,h,j"},
}
# A mask that is no window, of numbers of batch entries or documents.
PREFIX = {"causal": False, "visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}}
# Conditions that kernels check for each pair: two runs with a gap, and one that reads numbers of documents.
SINKS_AND_WINDOW = {"visible": "(j < 4) | (i - j < 70)"}
NUMBERED = {"visible": "(numbers[b] + i // 50 - j // 50) % 3 != 1", "parameters": {"numbers": "b"}}
# The fused backward pass of "tile" has gradients of what these read.
OF_HEADS = {
    "logits": "s / 2 - slopes[h] * (i - j) / 16 + shifts[b, h] * log(abs(i - j) + 1)",
    "parameters": {"slopes": "h", "shifts": "b,h"},
}
# Tables whose entries are not in the order of distances, and with an entry for all far keys on each side.
BY_DISTANCE = {
    "logits": "s + t[h, min(40, abs(i - j))] + u[h, max(0, min(60, i - j + 30))] * (i - j) / 100",
    "parameters": {"t": "h,41", "u": "h,61"},
}


class Problem(NamedTuple):
    """What an op is called with.

    Attributes:
        inputs: its arguments.
        grad_out: the gradient of its output.
        q_tail: queries to decode with the same keys and values.
        scale: factor of q k^T.
    """

    inputs: Inputs
    grad_out: Tensor
    q_tail: Tensor
    scale: float


def random(spec: Spec, sizes: Sizes, scale: float | None = None, new_tokens: int = NEW_TOKENS) -> Problem:
    """Normal numbers, with any scale."""
    sampler = Sampler.for_checks(spec, sizes, torch.device("cpu"))
    inputs, grad_out, q_tail = sampler.inputs(), sampler.outputs(), sampler.queries(new_tokens, decode=True)
    return Problem(inputs, grad_out, q_tail, spec.head_dim**-0.5 if scale is None else scale)


def growing(spec: Spec, sizes: Sizes) -> Problem:
    """Scores of every other row grow by 30 along the keys, so that each tile of keys exceeds all tiles before.

    In heads 0, 2, ... these are the even rows, in the others the odd ones; the scores of the rows between them do not
    grow. The kernel is nearly the identity, so that convolved scores are like that, too.
    """
    problem = random(spec, sizes)
    inputs, axis = problem.inputs, torch.ones(spec.head_dim) / spec.head_dim**0.5
    size = (30 / problem.scale) ** 0.5

    def queries(q: Tensor) -> Tensor:
        heads, rows = torch.arange(q.shape[1]), torch.arange(q.shape[2])
        grows = (rows + heads[:, None]) % 2 == 0
        return (q + size * grows[..., None] * axis).to(q.dtype)

    position = torch.arange(sizes.nk) / sizes.nk
    k = (inputs.k + size * position[:, None] * axis).to(inputs.k.dtype)
    weight = 0.3 / (spec.cq * spec.ck) ** 0.5 * inputs.weights["weight"]
    weight[:, -1, spec.pad_left] += 1
    inputs = replace(inputs, q=queries(inputs.q), k=k, weights={"weight": weight})
    return problem._replace(inputs=inputs, q_tail=queries(problem.q_tail))


def large_products(spec: Spec, sizes: Sizes) -> Problem:
    """Products of queries and keys as large as is supported; their scale makes the scores those of random inputs."""
    problem = random(spec, sizes)
    inputs, q_tail = problem.inputs, problem.q_tail
    keys = inputs.k.double().repeat_interleave(sizes.heads // sizes.kv_heads, 1)
    largest = max((q.double() @ keys.mT).abs().max().item() for q in (inputs.q, q_tail))
    factor = (LARGEST_PRODUCT / largest) ** 0.5
    inputs = replace(inputs, q=inputs.q * factor, k=inputs.k * factor)
    return problem._replace(inputs=inputs, q_tail=q_tail * factor, scale=problem.scale / factor**2)


def failures(op: Callable[..., Any], spec: Spec, problem: Problem, dropout_p: float = 0.0) -> list[str]:
    """Results and gradients of ``op`` that break the accuracy rule, a line each."""
    ours, eager = dropping(op, spec, problem, dropout_p)
    run, eager = (partial(one, scale=problem.scale, return_lse=True) for one in (ours, eager))
    return _broken(judge(run, eager, problem.inputs, problem.grad_out))


def dropping(
    op: Callable[..., Any], spec: Spec, problem: Problem, dropout_p: float
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``op`` and eager PyTorch, which drop the same with this probability, if it is not 0."""
    if not dropout_p:
        return op, eager_op(spec)
    (batch, heads, n_q, _), n_k, seed = problem.inputs.q.shape, problem.inputs.k.shape[2], torch.tensor([-3, 2**62])
    mask = dropout_mask(seed, dropout_p, batch, heads, n_q, n_k)
    return (
        partial(op, dropout_p=dropout_p, dropout_seed=seed),
        partial(eager_op(spec), dropout_p=dropout_p, dropout_mask=mask),
    )


def failures_through_lse(op: Callable[..., Any], spec: Spec, problem: Problem, dropout_p: float = 0.0) -> list[str]:
    """The same where gradients come through the log-sum-exp as well as through the output."""

    def with_lse(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        """The log-sum-exp as one more column of the output, 0 where a row sees no key; and as it is."""

        def run(*qkv: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = function(*qkv, **weights, scale=problem.scale, return_lse=True)
            return torch.cat([out, lse.masked_fill(lse == -torch.inf, 0).to(out.dtype).unsqueeze(-1)], -1), lse

        return run

    grad_lse = torch.randn(problem.grad_out.shape[:3], generator=torch.Generator().manual_seed(1))
    grad_out = torch.cat([problem.grad_out, grad_lse.to(problem.grad_out.dtype).unsqueeze(-1)], -1)
    ours, eager = dropping(op, spec, problem, dropout_p)
    return _broken(judge(with_lse(ours), with_lse(eager), problem.inputs, grad_out))


def decode_failures(
    op: Any, spec: Spec, problem: Problem, lengths: Sequence[int] | None = None, num_splits: int | None = None
) -> list[str]:
    """The same of ``op.decode``, of as many new tokens as ``problem`` has queries for.

    Args:
        op: what ``mtagen.build`` returns.
        spec: its spec.
        problem: the keys and values are the cache.
        lengths: keys in use, by batch entry; by default all.
        num_splits: parts the keys are split into; by default as planned.
    """
    inputs, q_tail = problem.inputs, problem.q_tail
    k, v, options = inputs.k, inputs.v, inputs.options(inputs.named)
    batch, _, capacity, _ = k.shape
    tail = q_tail.shape[2]
    used = [min(length, capacity) for length in lengths or batch * [capacity]]
    before_the_first = torch.arange(tail) < tail - torch.tensor(used)[:, None]
    unused = torch.arange(capacity) >= torch.tensor(used)[:, None]
    out, lse = op.decode(
        q_tail.masked_fill(before_the_first[:, None, :, None], torch.nan),
        *(x.masked_fill(unused[:, None, :, None], torch.nan) for x in (k, v)),
        **options,
        cache_seqlens=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        scale=problem.scale,
        num_splits=num_splits,
        return_lse=True,
    )

    def expected(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Each entry alone, in ``dtype``; rows of new tokens before its first key are 0, with -inf or the sink."""
        outs, lses = torch.zeros(out.shape, dtype=dtype), torch.full(lse.shape, -torch.inf, dtype=dtype)
        if spec.sink:
            lses[:] = inputs.weights["sink"][:, None]
        for entry, n in enumerate(used):
            rows, new = min(tail, n), min(out.shape[2], n)
            if not n:
                continue
            one = (x[entry : entry + 1].to(dtype) for x in (q_tail[:, :, tail - rows :], k[:, :, :n], v[:, :, :n]))
            read = {name: inputs.part(name, x, entry, slice(n)) for name, x in inputs.named.items()}
            whole = eager_op(spec, return_lse=True)(*one, **inputs.options(read), scale=problem.scale)
            outs[entry, :, -new:], lses[entry, :, -new:] = (x[0, :, -new:] for x in whole)
        return outs, lses

    (eager, eager_lse), (exact, exact_lse) = expected(q_tail.dtype), expected(torch.float64)
    judged = compare(out, eager, exact, terms=v.abs().max().item()), compare(lse, eager_lse, exact_lse)
    return _broken(dict(zip(("decode out", "decode lse"), judged, strict=True)))


def forward_failures(forward: Callable[..., tuple[Tensor, Tensor]], spec: Spec, problem: Problem) -> list[str]:
    """The same of a host function of the forward pass, alone."""
    inputs = problem.inputs

    def eager(named: dict[str, Tensor]) -> Any:
        qkv = (named[name] for name in "qkv")
        return eager_op(spec, return_lse=True)(*qkv, **inputs.options(named), scale=problem.scale)

    exact = eager({name: x.double() for name, x in inputs.named.items()})
    results = zip(forward(*inputs.arguments, problem.scale), eager(inputs.named), exact, strict=True)
    terms = inputs.v.abs().max().item(), 0.0
    judged = (compare(*three, terms=term) for three, term in zip(results, terms, strict=True))
    return _broken(dict(zip(("out", "lse"), judged, strict=True)))


def backward_failures(backward: Callable[..., tuple[Tensor, ...]], spec: Spec, problem: Problem) -> list[str]:
    """The same of a host function of the backward pass, alone: it gets the results of float64, rounded."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            exact = eager_op(spec, return_lse=True)(*(x.double() for x in tensors), scale=problem.scale)
            out, lse = exact[0].to(tensors[0].dtype), exact[1].float()
            context.save_for_backward(*tensors, out, lse)
            return out, lse

        @staticmethod
        def backward(context: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
            return backward(grad_out, grad_lse, *context.saved_tensors, problem.scale)

    ours, eager = (lambda *qkv, weight: Attention.apply(*qkv, weight)), partial(eager_op(spec), scale=problem.scale)
    judged = judge(ours, partial(eager, return_lse=True), problem.inputs, problem.grad_out)
    return _broken({name: judged[name] for name in judged if name.startswith("d")})


def host_decode_failures(
    decode: Callable[..., tuple[Tensor, Tensor]],
    spec: Spec,
    problem: Problem,
    lengths: Sequence[int] | None = None,
    num_splits: int | None = None,
) -> list[str]:
    """:func:`decode_failures` of a host function of decode, alone."""

    def as_op(*qkv: Tensor, weight: Tensor, parameters: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
        learned = (*([options["sink"]] if spec.sink else []), *(parameters or {}).values())
        return decode(*qkv, weight, *learned, options["scale"], options["cache_seqlens"], options["num_splits"])

    return decode_failures(SimpleNamespace(decode=as_op), spec, problem, lengths, num_splits)


def _broken(judged: dict[str, Comparison]) -> list[str]:
    return [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]


def failures_in_triton(*sizes: Sizes, **options: Any) -> list[str]:
    """Failures of calls, gradients and decode steps of an op of Triton's kernels, for problems of these sizes."""
    op = mtagen.build(head_dim=16, backend="triton", dtype="fp32", **options)
    spec, found = op.plan.spec, []
    for one in sizes:
        problem = random(spec, one)
        found += failures_through_lse(op, spec, problem) + decode_failures(op, spec, problem)
    return found
