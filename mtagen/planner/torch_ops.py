"""Passes made of PyTorch ops, which leave nothing to decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..spec import Spec
from .kernel import Kernel
from .lift.passes import flop_per_score
from .passes import Fields, PassPlan
from .targets import Target

__all__ = ["TorchPass", "candidates", "flop_per_score", "from_fields"]  # which lift, as Triton's kernels do


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


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> TorchPass:
    """The one plan there is; the target may be ``cpu``."""
    return TorchPass(spec, target, pass_name)
