"""The function of scores in CUDA kernels, and what kernels read for it and for the softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from sympy import Expr

from ...spec import Spec
from ..geometry.score import GRADIENT, SCORE, ParameterSum, ScoreFunction, ScoreStage
from ..kernel import Argument, reads


@cache
def score_function(spec: Spec) -> ScoreFunction:
    """Return the function of scores in the CUDA kernels of a request.

    A tanh comes from the GPU's instruction if the dtype is bf16: bf16 rounds scores by 2^-9 of their
    value, the instruction errs by 2^-11. fp16 is more accurate than the instruction.
    """
    stage = ScoreStage.of(spec)
    if not why_not_summed(spec):
        stage = replace(stage, sums=tile_sums(stage))
    function = stage.function_of_any_unit
    return function.with_fast_tanh() if spec.dtype == "bf16" else function


def tile_sums(stage: ScoreStage) -> tuple[ParameterSum, ...]:
    """Return the gradients of parameters that the main kernel of the fused backward pass sums, from the gradients of
    scores.

    Sums of rows need no scores, see :func:`row_factor`.

    Raises:
        ValueError: one needs scores.
    """
    return replace(stage, sums=tuple(x for x in stage.sums if x.kind != "row")).sums_from_scores


def row_factor(of: ParameterSum) -> Expr:
    """Return by what a sum of rows multiplies the gradients of its rows' logits.

    The sum of the gradients of a row's logits follows from the row's statistics: a number that is
    added to all of them changes only the log-sum-exp, and the probability of a sink.
    """
    return of.term / GRADIENT


@cache
def why_not_summed(spec: Spec) -> str:
    """Return the reason why the fused backward pass cannot sum the gradients of all parameters; empty if it can.

    Its registers hold the gradients of scores, but no longer the scores. A CTA has all scores of its
    keys, and parts of rows. It adds up scores of equal distance, which lie on diagonals of its tiles.
    """
    stage = ScoreStage.of(spec)
    for of in stage.sums:
        name = of.view.parameter.name
        if of.kind == "row" and not row_factor(of).is_number:
            return f"{name} has an entry for each query, which is not only added to logits"
        if of.kind == "table" and not of.is_of_distance:
            return f"the entry of {name} depends on more than i - j"
        if of.view.token_axes and of.view.table > 1:
            return f"{name} has a table for each token"
        if of.kind != "row" and of.term.has(SCORE):
            return f"the gradient of {name} depends on scores, which registers no longer hold"
    try:
        tile_sums(stage)
    except ValueError:
        return "the slope of the function is not a fixed number, and gradients of parameters need one"
    return ""


def parameters(spec: Spec, *, restrict: bool = True) -> tuple[Argument, ...]:
    """Return pointers to the parameters that the function of scores reads."""
    return reads("float", *(view.argument for view in ScoreStage.of(spec).views), restrict=restrict)


def sink(spec: Spec, *, restrict: bool = True) -> tuple[Argument, ...]:
    """Return the pointer to the sinks of heads, if the softmax has them."""
    return reads("float", "sink", restrict=restrict) if spec.sink else ()
