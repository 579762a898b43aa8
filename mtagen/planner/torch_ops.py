"""Plans of passes that are made of PyTorch ops. They have no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..spec import Spec
from .kernel import Kernel
from .lift import passes as lift
from .passes import Fields, PassPlan
from .strip import passes as strip
from .targets import Target


@dataclass(frozen=True)
class TorchPass(PassPlan):
    """One pass made of tiled PyTorch ops, on any device.

    It has no decisions, so its cost is never compared.
    """

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
    """Return the only plan of a pass."""
    return [from_fields(pass_name, spec, target.name, {})]


def flop_per_score(pass_name: str, spec: Spec) -> int:
    """Return the flop per (row, key) pair of a training pass: that of Triton's kernels of the same
    lowering.
    """
    if spec.is_liftable:
        return lift.flop_per_score(pass_name, spec)
    return strip.LOWERINGS["triton"].flop_per_score(pass_name, spec)


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> TorchPass:
    """Return the only plan of a pass; the target may be ``cpu``."""
    return TorchPass(spec, target, pass_name)
