"""The accuracy rule: errors are at most a few times those of eager PyTorch in the same dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError, explain

OUTPUT_FACTOR = 2.0  # for out and lse
GRADIENT_FACTOR = 3.0  # for dq, dk, dv and dweight
SUM_ULPS = 8  # ulps of the accumulator's dtype; correct fp32 implementations differed by up to 5


@dataclass(frozen=True)
class Comparison:
    """Largest absolute errors of a result and of eager PyTorch against float64, and the verdict.

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
        """Whether the result passes.

        No result passes where eager PyTorch overflows, because that proves nothing.
        """
        return self.error <= self.allowed < math.inf


def compare(
    ours: Tensor, eager: Tensor, ref64: Tensor, *, factor: float = OUTPUT_FACTOR, terms: float = 0.0
) -> Comparison:
    """Judge a result by max|ours - ref64| <= factor * max(max|eager - ref64|, floor).

    Eager's error can be zero by luck (N = 1, where softmax is 1, or a handful of values), and no
    implementation can be better than its arithmetic. So ``floor`` is the error that a careful
    implementation may have: half an ulp of eager's dtype at max|ref64|, from rounding the result,
    plus ``SUM_ULPS`` ulps of the dtype of sums (fp32, or fp64 for fp64) at ``max(max|ref64|,
    terms)``, from adding hundreds of terms in another order. In bf16 and fp16 the floor is about
    the smallest error that eager has in practice; in fp32 it is 1e-6 of the magnitude.

    Args:
        ours: the result to judge.
        eager: plain PyTorch's result in the same dtype.
        ref64: plain PyTorch's result in float64, from the same (low-precision) inputs.
        factor: ``OUTPUT_FACTOR`` or ``GRADIENT_FACTOR``.
        terms: magnitude of the summed terms, where they may be larger than the reference. Examples:
            out averages values; the gradient through the softmax of a row that sees one key is a
            difference of equal numbers.

    Raises:
        InputError: the shapes differ, or the reference is not float64.
    """
    if not ours.shape == eager.shape == ref64.shape:
        shapes = tuple(map(tuple, (ours.shape, eager.shape, ref64.shape)))
        raise InputError(explain("shapes of ours, eager, ref64", shapes, "must be equal", "three equal shapes"))
    if ref64.dtype != torch.float64:
        raise InputError(explain("ref64", ref64.dtype, "the reference must be float64", torch.float64))
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
