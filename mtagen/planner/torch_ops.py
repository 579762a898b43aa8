"""Passes made of PyTorch ops, which leave nothing to decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..spec import Spec
from .kernel import Kernel
from .lift import passes as lift
from .passes import Fields, SettledPass
from .strip import passes as strip
from .targets import Target


@dataclass(frozen=True)
class TorchPass(SettledPass):
    """One pass made of tiled PyTorch ops, on any device."""

    spec: Spec
    target: str
    pass_name: str

    lowering = "tiled ops"
    backend = "torch"

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return ()

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
