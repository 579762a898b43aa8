"""The formula of a kernel of rows: its inputs, steps and results follow from its role and the stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .stages import PROBABILITY_SCALE, SCORE_SCALE, Stages


@dataclass(frozen=True)
class RowFormula:
    """The formula of a kernel of rows.

    Attributes:
        role: the kernel's role in its pass.
        stages: the stages that the kernels of the pass compute.
    """

    role: str
    stages: Stages

    @property
    def reads_scores(self) -> bool:
        """Whether the kernel computes a softmax, or its gradient, from scores."""
        return "post_mix" not in self.role

    @property
    def knows_lse(self) -> bool:
        """Whether the log-sum-exps are an input."""
        return self.role == "probabilities"

    @property
    def only_sums(self) -> bool:
        """Whether the kernel only sums sections of rows, for another kernel that merges the sums."""
        return self.role == "decode_statistics"

    @property
    def merges_sums(self) -> bool:
        """Whether the sums of a row's sections are an input."""
        return self.role == "decode_softmax"

    @property
    def backward(self) -> bool:
        """Whether the kernel computes gradients."""
        return self.role.endswith("backward")

    @property
    def planes(self) -> int:
        """Number of planes that the kernel reads."""
        return 2 if self.backward else 1

    @property
    def results(self) -> int:
        """Number of planes that the kernel writes."""
        if self.only_sums:
            return 0
        return 2 if self.backward and (self.stores_probabilities or not self.reads_scores) else 1

    @property
    def sweeps(self) -> int:
        """Number of loops over the keys of a row."""
        return 2 if self.reads_scores and not (self.knows_lse or self.only_sums or self.merges_sums) else 1

    @property
    def mixes_results(self) -> bool:
        """Whether the kernel also mixes the heads after the softmax."""
        return self.stages.fused_post_mix and self.reads_scores and not self.only_sums

    @property
    def scales_results(self) -> bool:
        """Whether results are scaled, because fp16 holds them in planes or as operands."""
        return (self.stages.post_is_separate and not self.only_sums) or self.mixes_results

    @property
    def scales_probabilities(self) -> bool:
        """Whether the kernel computes probabilities times their scale, from exponents."""
        return self.reads_scores and (self.backward or self.scales_results)

    @property
    def divides_probabilities(self) -> bool:
        """Whether the kernel divides by the scale of probabilities."""
        return self.backward or self.mixes_results or not self.reads_scores

    @property
    def stores_probabilities(self) -> bool:
        """Whether a backward kernel stores the probabilities that multiply the values."""
        return not self.stages.post_is_separate

    @property
    def matrices(self) -> bool:
        """Whether the kernel computes gradients of mixing matrices."""
        return self.stages.mix is not None or self.mixes_results

    @property
    def sums_matrices(self) -> bool:
        """Whether each CTA sums the gradient of a mixing matrix."""
        return self.backward and (self.matrices or not self.reads_scores)

    @property
    def drops(self) -> bool:
        """Whether the kernel applies dropout."""
        return self.role in self.stages.dropping

    @property
    def result(self) -> str:
        """Element type of ``out``."""
        return "Score" if self.stages.post_is_separate and self.reads_scores else "Element"

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment."""
        mixed = "M x" if self.stages.mix else "x"
        probabilities = f"N softmax({mixed})" if self.mixes_results else f"softmax({mixed})"
        yield "A strip is a block of rows of scores. Its planes [slot, r, j] have slots of heads, rows r and keys j;"
        yield "rows are `pitch` elements apart, a multiple of 64. In each row of heads that mix:"
        match self.role:
            case "softmax" | "decode_softmax":
                yield f"out = {probabilities}, over keys; and lse of rows from `skip` on."
            case "decode_statistics":
                yield f"sums = log2 of the sum of exp({mixed}), over keys, for each section with keys of the row."
            case "probabilities":
                yield f"out = exp({mixed} - lse)."
            case "post_mix":
                yield "out = N x; zeros for keys that rows before `skip` see."
            case "decode_post_mix":
                yield "out = N x."
            case "post_mix_backward":
                yield "out = N x, dy becomes N^T dy, and the gradient of N. Both are zeros for keys that rows before"
                yield "`skip` see."
            case _:
                yield f"dx, the gradient of x, from g, the gradient of {probabilities}; and gradients of matrices."
                yield "x holds scores in fp16; g and dx have the dtype of q; dx is the gradient of unscaled scores."
        if self.drops:
            gradient = ", and first to their gradient" if self.backward else ""
            yield f"Dropout applies last to probabilities{gradient}; those that it keeps are multiplied by keep_scale."
        if self.sums_matrices:
            yield "Each CTA adds its part of a matrix's gradient to its own sums, which the caller sets to zero first:"
            yield "(bundles of heads, PROGRAMS, 16, 16) fp32."
        scales = [f"scores times {SCORE_SCALE}"] * self.reads_scores
        scales += [f"probabilities times {PROBABILITY_SCALE}"] * (not self.only_sums)
        yield f"Planes of fp16 hold {', and '.join(scales)}."
