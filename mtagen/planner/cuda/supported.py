"""The check that the CUDA backend supports a dtype and a target."""

from __future__ import annotations

from ...errors import PlanError, explain
from ...spec import Spec
from ..targets import TARGETS, Target

DTYPES = ("bf16", "fp16")


def check_backend(spec: Spec, target: Target) -> None:
    """Check that CUDA kernels have the dtype, and that the target has mma instructions.

    Raises:
        PlanError: one of them is missing.
    """
    if spec.dtype not in DTYPES:
        raise PlanError(explain("dtype", spec.dtype, "the cuda backend supports 16-bit dtypes only", DTYPES))
    if "mma" not in target.matrix:
        legal = tuple(name for name, row in TARGETS.items() if "mma" in row.matrix)
        raise PlanError(
            explain("target", target.name, "the cuda backend needs mma instructions, which this target lacks", legal)
        )
