"""A built op against the specification on this machine, by the rule of :mod:`.accuracy`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from .accuracy import Comparison
from .dtypes import TORCH_DTYPES
from .errors import SpecError, explain
from .measure.cases import Sizes
from .measure.inputs import Sampler
from .measure.judge import eager_op, judge, judge_decode
from .spec import Spec

SIZES = (
    Sizes(8, 8, 4, 1, 1),  # enough rows that eager is not exact by luck
    Sizes(2, 2, 2, 67, 67),
    Sizes(2, 4, 2, 113, 203),  # ragged, grouped queries
    Sizes(1, 2, 1, 70, 9),  # when causal, most queries see no key
    Sizes(1, 2, 1, 511, 515),  # many tiles
)

_MIN_ENTRIES = 16  # of a weight, whose gradients are compared, or eager's largest error may be small by luck


class Op(Protocol):
    """What is used here of the op that ``mtagen.build`` returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def decode(self, *args: Any, **kwargs: Any) -> Any: ...


class Row(NamedTuple):
    """One result at one size, judged."""

    sizes: Sizes
    result: str
    comparison: Comparison


def check(op: Op, spec: Spec, device: torch.device, sizes: Sequence[Sizes] = SIZES) -> Iterator[Row]:
    """Forward, all gradients and decode of ``op`` on random inputs, size by size; for small kernels with more heads.

    Raises:
        SpecError: the dtype is as wide as that of the float64 reference.
    """
    if spec.dtype == "fp64":
        legal = [name for name in TORCH_DTYPES if name != "fp64"]
        raise SpecError(explain("dtype", spec.dtype, "must be narrower than the float64 reference", legal))
    eager = eager_op(spec, return_lse=True)
    for one in sizes:
        enough = _with_enough_entries(spec, one)
        sampler = Sampler.for_checks(spec, enough, device)
        inputs, grad_out, new_tokens = sampler.inputs(), sampler.outputs(), min(2, one.nk)
        to_decode = replace(inputs, q=sampler.queries(new_tokens, decode=True))
        # Let cuDNN use TF32, and eager convolutions in fp32 would be no yardstick.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            results = judge(partial(op, return_lse=True), eager, inputs, grad_out)
            results |= judge_decode(op.decode, eager, to_decode, new_tokens)
        for name, comparison in results.items():
            yield Row(enough, name, comparison)


def failures(op: Op, spec: Spec, device: torch.device, sizes: Sequence[Sizes] = SIZES) -> list[str]:
    """The results of :func:`check` that break the accuracy rule, a line each."""
    return [
        f"{row.sizes} {row.result}: {row.comparison.error:.3g} > {row.comparison.allowed:.3g}"
        for row in check(op, spec, device, sizes)
        if not row.comparison.ok
    ]


def _with_enough_entries(spec: Spec, sizes: Sizes) -> Sizes:
    """The same with as many times the heads as the smallest weight and the groups that are mixed need."""
    times = math.lcm(*(mixed // math.gcd(mixed, sizes.heads) for mixed in spec.mixed.values()))
    entries = [math.prod(shape) for shape in spec.weights(times * sizes.heads).values()]
    times *= math.ceil(_MIN_ENTRIES / min(entries, default=_MIN_ENTRIES))
    return sizes._replace(heads=times * sizes.heads, kv_heads=times * sizes.kv_heads)
