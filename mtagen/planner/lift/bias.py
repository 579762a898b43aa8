"""The bias: the convolution of what an expression before the convolution adds by distance.

If ``scores`` is a s + B[h, p - j] with a number a, the convolved score is a C + (W * B), because a convolution is
linear. W * B, the bias, depends on the head and on p - j only, except where the filter of a score reaches past an end
of the sequence: in the first rows, and at the keys next to either end. A table has an entry for each diagonal, and
one for each score at an end. The mask needs no entries of its own, because windows hide scores by p - j.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy

from ...spec import Spec
from ..geometry.affine import N_K, N_Q, Size
from ..geometry.mask import Mask
from ..geometry.score import SCORE, ScoreStage

LARGEST_BLOCK = 128  # rows or keys of a tile, see `tiling.candidates`


@dataclass(frozen=True)
class Bias:
    """The geometry of the bias of a head.

    Attributes:
        factor: a, by which the expression multiplies scores. It becomes a factor of the scale.
        stage: the expression. For a score of 0 its value is B.
        rows: number of first rows whose filters reach before the sequence.
        before, after: number of keys at the beginning and at the end whose filters reach past the keys,
            where the mask does not hide what is missing.
        margin: number of diagonals before the first and after the last that tiles read, for rows and
            keys that do not exist.
    """

    factor: float
    stage: ScoreStage
    rows: int
    before: int
    after: int
    margin: int = LARGEST_BLOCK

    @property
    def reaches_past_ends(self) -> bool:
        """Whether some filter reaches past an end of the sequence."""
        return self.rows + self.before + self.after > 0

    @property
    def entries(self) -> Size:
        """Number of entries of a head: diagonals, scores of the first rows, and scores at the ends of the keys."""
        return N_Q + N_K - 1 + 2 * self.margin + self.rows * N_K + (self.before + self.after) * N_Q


def why_not(spec: Spec) -> str:
    """Return the reason why the convolution of ``scores`` is no bias; empty if it is one, or there is none."""
    if spec.scores is None:
        return ""
    stage = ScoreStage.of(spec, "scores")
    factor = sympy.diff(stage.modify, SCORE)
    if not (factor.is_number and factor.is_finite and factor != 0):
        return "scores is no constant times s plus terms without s, and only a linear function passes a convolution"
    if stage.counts_keys:
        return "scores adds terms that are not of the distance i - j, and their convolution is no table by distance"
    if any(view.has_entries for view in stage.views):
        return "scores reads a parameter of batch entries, and tables by distance are those of heads"
    if spec.packed:
        return "scores changes scores before the convolution, and tables by distance are not those of packed documents"
    return ""


@cache
def bias(spec: Spec) -> Bias | None:
    """Return the bias of a request; None if it has no ``scores``, or their convolution is none."""
    if spec.scores is None or why_not(spec):
        return None
    stage = ScoreStage.of(spec, "scores")
    after = 0 if Mask.of(spec).bounds_keys else spec.pad_right
    return Bias(float(sympy.diff(stage.modify, SCORE)), stage, spec.cq - 1, spec.pad_left, after)
