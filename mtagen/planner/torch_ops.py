"""Passes made of PyTorch ops, which leave nothing to decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..spec import Spec
from .kernel import Kernel
from .lift import passes as lift
from .passes import Fields, PassPlan
from .targets import Target


@dataclass(frozen=True)
class TorchPass(PassPlan):
    """One pass made of tiled PyTorch ops, on any device."""

    spec: Spec
    target: str
    pass_name: str

    lowering = "tiled ops"
    backend = "torch"

    @property
    def cost(self) -> float:
        return 0.0

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return ()

    def decisions(self) -> Mapping[str, Fields]:
        return {}

    def alternatives(self, key: str) -> Sequence[TorchPass]:
        self.check_key(key)
        return [self]

    def decided(self, key: str, fields: Fields) -> TorchPass:
        self.check_key(key)
        return self

    def decision_cost(self, key: str) -> float:
        self.check_key(key)
        return 0.0

    def rows_of_table(self) -> Iterable[tuple[str, str, str]]:
        return ()


def candidates(pass_name: str, spec: Spec, target: Target) -> Sequence[TorchPass]:
    """The one plan there is."""
    return [from_fields(pass_name, spec, target.name, {})]


def flop_per_score(pass_name: str, spec: Spec) -> int:
    """Flop per (row, key) pair of a training pass, 2 per multiply-add.

    A convolution before the softmax alone is lifted, as Triton's kernels do it. Of other pipelines each stage is done
    as it is defined; a backward pass does them again, and twice more for the two gradients of each.
    """
    if spec.convolves_only:
        return lift.flop_per_score(pass_name, spec)
    d, dv = spec.head_dim, spec.value_head_dim
    stages = sum(cq * ck for cq, ck in spec.kernels.values()) + sum(spec.mixed.values())
    return {"forward": 2 * (d + dv + stages), "backward": 2 * (3 * d + 2 * dv + 3 * stages)}[pass_name]


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> TorchPass:
    """The one plan there is; the target may be ``cpu``."""
    return TorchPass(spec, target, pass_name)
