"""Choose the kernels of the lowering "strip" that are CUDA's instead of Triton's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from ...errors import PlanError, explain
from ...spec import Spec
from ..cuda.supported import check_backend
from ..kernel import Kernel
from ..targets import get_target
from . import products, rows
from .kernels import strip_kernels
from .planes import plane_kernels
from .products import product_kernel
from .row_formula import RowFormula
from .row_shared import MAX_HEADS
from .rows import RowKernel
from .source import DECODE, StripSource
from .stages import Stages
from .steps import StepKernel
from .tokens import TokenKernel
from .values import ValuesKernel


def cuda_sources(spec: Spec, target: str, pass_name: str) -> tuple[StripSource, ...]:
    """Return the CUDA kernels that replace Triton kernels of a pass.

    One of them, ``grad_shares``, may also replace a product that cuBLAS computes beside Triton's
    kernels. Each kernel has the form that the cost model expects to be the fastest.

    Raises:
        PlanError: no CUDA kernel fits; the message says why.
    """
    check_backend(spec, get_target(target))
    by_role = fastest(spec, target, pass_name)
    roles = [kernel.role for kernel in strip_kernels(pass_name, spec, target)]
    if "softmax_backward" in roles and "grad_shares" not in roles:
        roles.append("grad_shares")  # otherwise computed by cuBLAS
    sources = tuple(by_role[role] for role in roles if role in by_role)
    if not sources:
        rule = (
            f"cuda mixes up to {MAX_HEADS} heads, and convolves with mask='source' and value head dims that are "
            "multiples of 16"
        )
        raise PlanError(explain("stages", spec.to_dict(), rule, "backend='triton'"))
    return sources


@lru_cache(maxsize=64)
def fastest(spec: Spec, target: str, pass_name: str) -> Mapping[str, StripSource]:
    """Return the CUDA kernels that may replace Triton kernels of a pass, by role, in the form that the cost model
    prefers.
    """
    kernels = strip_kernels(pass_name, spec, target)
    return {source.role: forms[0] for source in _candidates(spec, target, kernels) if (forms := source.variants)}


def _candidates(spec: Spec, target: str, kernels: Iterable[Kernel]) -> Iterator[StripSource]:
    stages = Stages(spec)
    yield from (product_kernel(spec, target, role) for role in products.ROLES if not _lacks_function(stages, role))
    for stage in stages.convolutions:
        # Probabilities that no later stage mixes are multiplied by v next, so they have the dtype of v.
        result = spec.dtype if stage.final and not stages.post_mix else "fp16"
        yield from plane_kernels(spec, target, stage, result)
        yield StepKernel(spec, target, stage, result)
    yield ValuesKernel(spec, target)
    for mixing in stages.token_mixes:
        roles = (f"{DECODE}{mixing.role}", mixing.role, f"{mixing.role}_backward")
        yield from (TokenKernel(spec, target, mixing, kernel) for kernel in kernels if kernel.role in roles)
    row_kernels = (kernel for kernel in kernels if kernel.role in rows.ROLES)
    yield from (RowKernel(spec, target, kernel) for kernel in row_kernels if not _lacks_function(stages, kernel.role))


def _lacks_function(stages: Stages, role: str) -> bool:
    """Return whether the kernel of a role applies a function of scores that CUDA's kernels lack."""
    if role in products.ROLES:
        return stages.spec.scores is not None and role.endswith("scores")
    return stages.spec.convolved is not None and RowFormula(role, stages).reads_scores
