"""Plan -> source text. Deterministic; decides nothing: the planner has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import PlanError, explain
from ..planner.lift.module import LiftModule
from ..planner.plan import Plan
from ..planner.strip.module import StripModule
from . import cuda, strip, triton

__all__ = ["Sources", "emit", "render"]


@dataclass(frozen=True)
class Sources:
    """What a plan is rendered to, once.

    Attributes:
        kernels: CUDA source by pass or role, or by role of the kernel in strips.
        host: the Python module that launches fused passes of CUDA, or None if there are none.
        module: the Python module of the passes that Triton serves, and of all strips, or None if there are none.
        files: all of them, text by file name.
    """

    kernels: Mapping[str, str]
    host: str | None
    module: str | None
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """sha256 of names and texts, as 64 hex digits."""
        digest = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            for part in (name, text):
                digest.update(f"{len(part)}:{part}".encode())
        return digest.hexdigest()


def render(plan: Plan) -> Sources:
    """The sources of a plan: CUDA sources and a Python module that launches them, and a Python module of kernels and
    launches if Triton serves any pass, or CUDA one by strips. None for PyTorch ops.
    """
    files: dict[str, str] = {}
    kernels = {name: cuda.render(one) for name, one in plan.cuda.items()}
    host = module = None
    files |= {f"{plan.cuda[name].name}.cu": text for name, text in kernels.items()}
    if plan.tile:
        host = cuda.render_host(plan)
        files[f"{cuda.host_name(plan)}.py"] = host
    if plan.lift:
        lift = LiftModule.of(plan.lift.values())
        module = triton.render(lift)
        files[f"{lift.name}.py"] = module
    if plan.strip:
        strips = StripModule.of(plan.strip.values())
        module = strip.render(strips)
        files[f"{strips.name}.py"] = module
    return Sources(kernels, host, module, files)


def emit(plan: Plan, directory: Path | str) -> list[Path]:
    """Write the plan's sources into ``directory``, which is made if missing.

    Returns:
        The paths written.

    Raises:
        PlanError: the plan's backend has no source to render.
    """
    sources = render(plan)
    if not sources.files:
        raise PlanError(explain("backend", plan.backend, "has no generated source", ("auto", "cuda", "triton")))
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in sources.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in sources.files]
