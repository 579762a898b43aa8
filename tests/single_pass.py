"""Single passes of the lowering "tile": the cheapest plan, whatever was measured, and its emitted host function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from mtagen.codegen import cuda, render
from mtagen.planner import Plan
from mtagen.planner.choice import COST_MODEL, PlannedPass
from mtagen.planner.kernel import Kernel
from mtagen.planner.targets import Target
from mtagen.planner.tile.candidates import candidates
from mtagen.planner.tile.passes import TilePass
from mtagen.runtime.load import load_host
from mtagen.spec import Spec


def cheapest(pass_name: str, spec: Spec, target: Target) -> Any:
    """The first candidate of a pass.

    Raises:
        PlanError: there is none.
    """
    return candidates(pass_name, spec, target)[0]


def plan_of(made: TilePass) -> Plan:
    """The plan that has this pass only."""
    sources = tuple((key, COST_MODEL) for key in made.decisions())
    return Plan(made.spec, made.target, (PlannedPass(made, "a test", sources),))


def host_module(made: TilePass) -> ModuleType:
    """The emitted host module of a pass, executed anew: it has no kernels yet."""
    module = ModuleType(made.name)
    exec(compile(cuda.render_host(plan_of(made)), f"{made.name}.py", "exec"), vars(module))
    return module


def on_gpu(made: TilePass) -> Callable[..., Any]:
    """The host function of a pass; its kernels are compiled at the first call."""
    planned = plan_of(made)
    function: Callable[..., Any] = getattr(load_host(planned, render(planned), made.pass_name), made.pass_name)
    return function


class Launch(NamedTuple):
    """A launch that the host function asked for, with the arguments by name."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Mapping[str, float]


class RecordedKernel:
    """Stands in for a loaded kernel, and notes its launches."""

    def __init__(self, kernel: Kernel, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __call__(self, grid: tuple[int, ...], *values: float) -> None:
        """Note the launch."""
        names = (argument.name for argument in self._kernel.arguments)
        self._launches.append(Launch(self._kernel, grid, dict(zip(names, values, strict=True))))


class Recorder:
    """Calls the emitted host function of a pass, and launches nothing: tensors may be on the meta device."""

    def __init__(self, made: TilePass) -> None:
        self._function = getattr(module := host_module(made), made.pass_name)
        self._launches: list[Launch] = []
        for role, source in made.cuda.items():
            module.LOADED[role][None] = {kernel.role: self._record(kernel) for kernel in source.kernels}

    def __call__(self, *arguments: Any, **options: Any) -> list[Launch]:
        """The launches of one call."""
        self._launches.clear()
        self._function(*arguments, **options)
        return list(self._launches)

    def _record(self, kernel: Kernel) -> RecordedKernel:
        return RecordedKernel(kernel, self._launches)
