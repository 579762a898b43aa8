"""The accuracy rule: a result errs at most a few times more than eager PyTorch in the same low precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError, explain

OUTPUT_FACTOR = 2.0  # for out and lse
GRADIENT_FACTOR = 3.0  # for dq, dk, dv and dweight
SUM_ULPS = 8  # of the accumulator; up to 5 were seen between sound fp32 implementations


@dataclass(frozen=True)
class Comparison:
    """Largest absolute errors against float64, and the verdict.

    Attributes:
        error: max|ours - ref64|; infinite if ours has a NaN, or an infinity that the reference has not.
        eager_error: max|eager - ref64|, infinite likewise.
        allowed: the largest ``error`` that passes.
    """

    error: float
    eager_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """The rule is kept. An eager result that overflows proves nothing, so it passes nothing."""
        return self.error <= self.allowed < math.inf


def compare(
    ours: Tensor, eager: Tensor, ref64: Tensor, *, factor: float = OUTPUT_FACTOR, terms: float = 0.0
) -> Comparison:
    """Judge a result by max|ours - ref64| <= factor * max(max|eager - ref64|, floor).

    Eager's error can be zero by luck (N = 1, where softmax is 1, or a handful of values), and nothing better
    than the arithmetic itself can be asked for. So ``floor`` is what a careful implementation may lose: half
    an ulp of eager's dtype at max|ref64|, from rounding the result, and a few ulps of the dtype it sums in
    (fp32, or fp64 for fp64) at ``max(max|ref64|, terms)``, from adding hundreds of terms in another order.
    In bf16 and fp16 the floor is about eager's error at its luckiest; in fp32 it is 1e-6 of the magnitude.

    Args:
        ours: the result to judge.
        eager: the same in plain PyTorch, in the low precision.
        ref64: the same in float64, from the same (low-precision) inputs.
        factor: ``OUTPUT_FACTOR`` or ``GRADIENT_FACTOR``.
        terms: size of the terms that were summed, where these may be larger than the reference: out averages
            values; the gradient through softmax of a row that sees one key is a difference of equal numbers.

    Raises:
        InputError: the shapes differ, or the reference is not float64.
    """
    if not ours.shape == eager.shape == ref64.shape:
        shapes = tuple(map(tuple, (ours.shape, eager.shape, ref64.shape)))
        raise InputError(explain("shapes", shapes, "of ours, eager and ref64 differ", "three equal shapes"))
    if ref64.dtype != torch.float64:
        raise InputError(explain("ref64", ref64.dtype, "is no float64 reference", torch.float64))
    magnitude = _largest(ref64[ref64.isfinite()].abs())
    accumulator = torch.promote_types(eager.dtype, torch.float32)
    rounding = 0.5 * torch.finfo(eager.dtype).eps * magnitude
    summing = SUM_ULPS * torch.finfo(accumulator).eps * max(magnitude, terms)
    eager_error = _error(eager, ref64)
    return Comparison(_error(ours, ref64), eager_error, factor * max(eager_error, rounding + summing))


def _error(result: Tensor, ref64: Tensor) -> float:
    difference = (result.double() - ref64).masked_fill(result == ref64, 0)  # equal infinities: lse of an empty row
    return _largest(difference.abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _largest(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0
