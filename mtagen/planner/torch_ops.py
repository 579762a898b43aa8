"""Passes made of PyTorch ops, which leave nothing to decide."""

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
    """One pass made of tiled PyTorch ops, on any device. It leaves nothing to decide, so that no cost is asked for."""

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
    """Flop per (row, key) pair of a training pass: as of Triton's kernels, which lift or strip as these ops do."""
    if spec.convolves_only:
        return lift.flop_per_score(pass_name, spec)
    return strip.LOWERINGS["triton"].flop_per_score(pass_name, spec)


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> TorchPass:
    """The one plan there is; the target may be ``cpu``."""
    return TorchPass(spec, target, pass_name)
