"""The check that fused passes support a request."""

from __future__ import annotations

from ...errors import PlanError, explain
from ...spec import Spec
from ..cuda.supported import check_backend
from ..cuda.toeplitz import check_filter
from ..passes import check_convolves_only, check_learned
from ..targets import Target


def check_supported(spec: Spec, target: Target) -> None:
    """Check the limits that all fused passes have.

    Raises:
        PlanError: the dtype, the target, the head dims or the filter is out of range.
    """
    check_convolves_only(spec, "cuda")
    check_learned(spec, "tile", ("visible", "parameters", "sink"))
    check_backend(spec, target)
    for name in ("head_dim", "value_head_dim"):
        if getattr(spec, name) % 16:
            raise PlanError(explain(name, getattr(spec, name), "must be a multiple of 16 for cuda", "16, 32, .. 256"))
    check_filter(spec.cq, spec.ck)
