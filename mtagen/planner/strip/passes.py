"""The passes of the lowering "strip"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import PlanError, explain
from ...spec import Spec
from ..kernel import Kernel
from ..passes import Fields, SettledPass
from ..targets import Target
from .kernels import strip_kernels
from .stages import Stages

WORKSPACE_BYTES = 2**30  # what the planes of a strip may take
# What one of them takes at most: 1024 rows of 16 heads at N = 8192. Of a strip of more rows, more is hidden by the mask
# and yet multiplied; fewer rows need more launches.
PLANE_BYTES = 2**28
ENOUGH_ROWS = 512  # of several sequences, before a strip takes more of them


@dataclass(frozen=True)
class StripPass(SettledPass):
    """One pass made of Triton kernels that stream over planes of scores.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: ``forward``, ``backward`` or ``decode``.
        workspace_bytes: what the planes may take, or those of one short strip of one sequence if that is more.
    """

    spec: Spec
    target: str
    pass_name: str
    workspace_bytes: int = WORKSPACE_BYTES

    lowering = "strip"
    backend = "triton"

    @cached_property
    def stages(self) -> Stages:
        """What the kernels are made for."""
        return Stages(self.spec)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return strip_kernels(self.pass_name, self.spec, self.target)

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes of a strip."""
        return self.stages.backward_planes if self.pass_name == "backward" else self.stages.forward_planes

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        yield self.pass_name, "planes", ", ".join(self.planes)
        yield self.pass_name, "workspace", f"at most about {self.workspace_bytes // 2**20} MiB, sums besides"
        for kernel in self.kernels:
            constants = ", ".join(f"{name} {value}" for name, value in kernel.constants)
            yield self.pass_name, kernel.role, f"{constants}, {kernel.threads // 32} warps"


def candidates(pass_name: str, spec: Spec, target: Target) -> Sequence[StripPass]:
    """The one plan there is.

    Raises:
        PlanError: the target has no kernels for the dtype.
    """
    if spec.dtype not in target.dtypes:
        raise PlanError(explain("dtype", spec.dtype, f"{target.name} has no kernels for it", target.dtypes))
    made = StripPass(spec, target.name, pass_name)
    _ = made.kernels  # raises where a tile does not fit
    return [made]


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> StripPass:
    """The plan with these decisions."""
    return StripPass(spec, target, pass_name)


def flop_per_score(pass_name: str, spec: Spec) -> int:
    """Flop per (row, key) pair of a training pass, 2 per multiply-add.

    Each stage counts as it is defined, a tap or a head of a group as one multiply-add. A backward pass does the stages
    again, and twice more for the two gradients of each.
    """
    d, dv = spec.head_dim, spec.value_head_dim
    stages = sum(cq * ck for cq, ck in spec.kernels.values()) + sum(spec.mixed.values())
    return {"forward": 2 * (d + dv + stages), "backward": 2 * (3 * d + 2 * dv + 3 * stages)}[pass_name]
