"""The function of scores in CUDA kernels."""

from __future__ import annotations

from ...spec import Spec
from ..geometry.score import ScoreFunction, ScoreStage


def score_function(spec: Spec) -> ScoreFunction:
    """Return the function of scores in the CUDA kernels of a request.

    A tanh comes from the GPU's instruction if the dtype is bf16: bf16 rounds scores by 2^-9 of their
    value, the instruction errs by 2^-11. fp16 is more accurate than the instruction.
    """
    function = ScoreStage.of(spec).function_of_any_unit
    return function.with_fast_tanh() if spec.dtype == "bf16" else function
