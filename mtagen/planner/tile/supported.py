"""The check that fused passes support a request."""

from __future__ import annotations

from ...errors import PlanError, explain
from ...spec import Spec
from ..passes import check_convolves_only
from ..targets import TARGETS, Target
from .toeplitz import toeplitz


def check_supported(spec: Spec, target: Target) -> None:
    """Check the limits that all fused passes have.

    Raises:
        PlanError: the dtype, the head dims or the target is out of range.
    """
    check_convolves_only(spec, "cuda")
    if spec.dtype not in ("bf16", "fp16"):
        raise PlanError(explain("dtype", spec.dtype, "the cuda backend supports 16-bit dtypes only", ("bf16", "fp16")))
    for name in ("head_dim", "value_head_dim"):
        if getattr(spec, name) % 16:
            raise PlanError(explain(name, getattr(spec, name), "must be a multiple of 16 for cuda", "16, 32, .. 256"))
    if "mma" not in target.matrix:
        legal = tuple(name for name, row in TARGETS.items() if "mma" in row.matrix)
        raise PlanError(
            explain("target", target.name, "the cuda backend needs mma instructions, which this target lacks", legal)
        )
    toeplitz(spec.cq, spec.ck)  # raises if the convolution is too large
