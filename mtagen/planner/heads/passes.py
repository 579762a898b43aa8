"""Plans of the lowering "heads", which mixes heads in the forward pass without planes of scores.

A mixed score needs the scores of all heads of its group. So a CTA takes a block of rows of a bundle
of heads, which mix only with each other, and streams tiles of a few keys. Warps that own heads and
warps that own rows exchange each tile through shared memory. Probabilities that are mixed after the
softmax need the sums of their rows first, so one kernel sums exponentials, and a second one
computes outputs.

A table may name this lowering or strips. Otherwise their costs decide (:mod:`..choice`), for the fewest heads that a
call may have, because bundles that are not full take as long. ``benchmarks/notes/strips.md`` has measured times.

The backward pass is that of strips, whose kernels may mix heads on the chip, too
(:mod:`..strip.on_chip_gradients`). It takes log-sum-exps of scores that both lowerings round alike:
fp16 in the scale of planes, mixed by matrices that are rounded to fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...errors import PlanError, explain
from ...spec import Spec
from ..geometry.affine import N_Q
from ..geometry.mask import Mask
from ..kernel import Buffer, Kernel
from ..names import other_stages
from ..passes import Fields, PassPlan, describe
from ..sizes import BATCH, HEADS
from ..strip.on_chip import CHUNKS, why_not
from ..strip.passes import StripPass
from ..strip.row_shared import MAX_HEADS
from ..strip.stages import Stages
from ..targets import SHARED_BYTES_PER_CYCLE, Target, get_target
from .kernels import PARTS, HeadsKernel, OutputsKernel, StatisticsKernel

FIELDS: Fields = {"lowering": "heads"}  # of the decision for this lowering
_BUSY = 0.64  # fraction of the time in which shared memory is busy (``benchmarks/notes/strips.md``)


@dataclass(frozen=True)
class HeadsForward(PassPlan):
    """The forward pass of a spec whose heads mix. Its only decision is that for this lowering.

    Attributes:
        spec: the request.
        target: name of the target.
    """

    spec: Spec
    target: str

    lowering = "heads"
    backend = "cuda"
    pass_name = "forward"
    rounds_as = "strip"

    @cached_property
    def cuda(self) -> Mapping[str, HeadsKernel]:
        """The CUDA kernels, by role."""
        return {kind.role: kind(self.spec, self.target) for kind in (StatisticsKernel, OutputsKernel)}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(kernel for source in self.cuda.values() for kernel in source.kernels)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the host allocates."""
        outputs = BATCH, HEADS, N_Q, self.spec.value_head_dim
        bundles = BATCH * ceiling(HEADS / Stages(self.spec).heads)
        return (
            Buffer("out", "q", outputs),
            Buffer("lse", "fp32", (BATCH, HEADS, N_Q)),
            Buffer("partial", "fp32", (CHUNKS, bundles, N_Q, MAX_HEADS)),
            Buffer("partial_out", "fp32", (PARTS, *outputs), needs=f"{PARTS} > 1"),
        )

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score: those of shared memory, in calls of the fewest heads."""
        moved = sum(source.moved for source in self.cuda.values())
        return moved * MAX_HEADS / Stages(self.spec).closed_heads / (_BUSY * SHARED_BYTES_PER_CYCLE)

    def decisions(self) -> Mapping[str, Fields]:
        return {key(self.spec): FIELDS}

    def alternatives(self, key: str) -> Sequence[HeadsForward]:
        self.check_key(key)
        return [self]

    def decided(self, key: str, fields: Fields) -> HeadsForward:
        self.check_key(key)
        if fields != FIELDS:
            raise PlanError(explain(key, describe(fields), f"is no candidate on {self.target}", describe(FIELDS)))
        return self

    def decision_cost(self, key: str) -> float:
        self.check_key(key)
        return self.cost

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        for role, source in self.cuda.items():
            yield self.pass_name, role, source.summary


def key(spec: Spec) -> str:
    """Return the key by which a table names the lowering of the forward pass of a spec: this one, or strips."""
    shape = f"{Mask.of(spec).name} {other_stages(spec)} d{spec.head_dim} dv{spec.value_head_dim}"
    return f"lowering forward {shape} {spec.dtype}"


def why_not_forward(spec: Spec, target: Target) -> str:
    """Return the reason why this lowering has no forward pass for a spec; empty if it has one."""
    reads_unmixed = StripPass(spec, target.name, "backward", "cuda").unmixed_columns
    return why_not(spec, target) or ("the fused backward pass reads unmixed outputs" if reads_unmixed else "")


def candidates(pass_name: str, spec: Spec, target: Target) -> Sequence[HeadsForward]:
    """Return the plan of the forward pass.

    Raises:
        PlanError: these kernels cannot compute the pass; the message says why.
    """
    if pass_name != "forward":
        raise PlanError(explain("pass", pass_name, "the lowering heads has no kernels for it", "forward"))
    if reason := why_not_forward(spec, target):
        rule = f"the lowering heads has no kernels for it: {reason}"
        raise PlanError(explain("spec", spec.to_dict(), rule, "the lowering strip"))
    return [HeadsForward(spec, target.name)]


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> HeadsForward:
    """Return the plan with these decisions.

    Raises:
        PlanError: these kernels cannot compute the pass, or a decision is for another lowering.
    """
    plan = candidates(pass_name, spec, get_target(target))[0]
    for name, fields in decisions.items():
        plan = plan.decided(name, fields)
    return plan


def flop_per_score(pass_name: str, spec: Spec) -> int:
    """Return the flop per (row, key) pair of the forward pass, 2 per multiply-add.

    Scores are computed and mixed twice.
    """
    scores = spec.head_dim + (spec.mixed_heads or 0)
    return 2 * (2 * scores + (spec.post_mixed_heads or 0) + spec.value_head_dim)
