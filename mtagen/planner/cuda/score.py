"""The function of scores in CUDA kernels, and what kernels read for it and for the softmax."""

from __future__ import annotations

from dataclasses import replace

from ...spec import Spec
from ..geometry.score import ScoreFunction, ScoreStage
from ..kernel import Argument, reads


def score_function(spec: Spec) -> ScoreFunction:
    """Return the function of scores in the CUDA kernels of a request.

    A tanh comes from the GPU's instruction if the dtype is bf16: bf16 rounds scores by 2^-9 of their
    value, the instruction errs by 2^-11. fp16 is more accurate than the instruction.
    """
    stage = ScoreStage.of(spec)
    if sums_are_fused(spec):
        stage = replace(stage, sums=stage.sums_from_scores)
    function = stage.function_of_any_unit
    return function.with_fast_tanh() if spec.dtype == "bf16" else function


def sums_are_fused(spec: Spec) -> bool:
    """Return whether the fused backward pass sums the gradients of all parameters.

    Its registers hold the gradients of scores, but no longer the scores. A CTA can add up a head's
    gradients of its keys. It has one sequence only.
    """
    stage = ScoreStage.of(spec)
    try:
        sums = stage.sums_from_scores
    except ValueError:
        return False
    return all(x.kind == "head" and not (spec.packed and x.view.has_entries) for x in sums)


def parameters(spec: Spec, *, restrict: bool = True) -> tuple[Argument, ...]:
    """Return pointers to the parameters that the function of scores reads."""
    return reads("float", *(view.argument for view in ScoreStage.of(spec).views), restrict=restrict)


def sink(spec: Spec, *, restrict: bool = True) -> tuple[Argument, ...]:
    """Return the pointer to the sinks of heads, if the softmax has them."""
    return reads("float", "sink", restrict=restrict) if spec.sink else ()
