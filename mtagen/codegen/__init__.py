"""Render a plan to source text.

Rendering is deterministic and takes no decisions; the planner took them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import PlanError, explain
from ..planner.lift.module import LiftModule
from ..planner.plan import Plan
from ..planner.strip.module import StripModule
from . import cuda, mask_tables, strip, triton

__all__ = ["Sources", "emit", "render"]


@dataclass(frozen=True)
class Sources:
    """The sources of a plan.

    Attributes:
        kernels: CUDA sources of fused passes and of the kernels of strips, by role.
        hosts: by pass, the name of the Python file that has its host function and its Triton
            kernels.
        files: texts of all files, by file name.
        tables: the name of the Python file that computes the tables of the mask; empty if kernels read none.
    """

    kernels: Mapping[str, str]
    hosts: Mapping[str, str]
    files: Mapping[str, str]
    tables: str = ""

    @cached_property
    def digest(self) -> str:
        """The sha256 of names and texts, as 64 hex digits."""
        digest = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            for part in (name, text):
                digest.update(f"{len(part)}:{part}".encode())
        return digest.hexdigest()


def render(plan: Plan) -> Sources:
    """Render a plan: CUDA kernels, a Python module for each lowering, and one for the tables of a mask.

    A module holds host functions and Triton kernels. Passes made of PyTorch ops have no sources.
    """
    kernels = {role: cuda.render(source) for role, source in plan.cuda.items()}
    files = {f"{plan.cuda[name].name}.cu": text for name, text in kernels.items()}
    hosts: dict[str, str] = {}

    def add_host(name: str, text: str, passes: Iterable[str]) -> None:
        files[f"{name}.py"] = text
        hosts.update(dict.fromkeys(passes, f"{name}.py"))

    if plan.tile:
        add_host(cuda.host_name(plan), cuda.render_host(plan), plan.tile)
    if plan.heads:
        add_host(cuda.heads_host_name(plan), cuda.render_heads_host(plan), plan.heads)
    if plan.lift:
        lift = LiftModule.of(plan.lift.values())
        add_host(lift.name, triton.render(lift), plan.lift)
    if plan.strip:
        strips = StripModule.of(plan.strip.values())
        add_host(strips.name, strip.render(strips), plan.strip)
    tables = ""
    if hosts and plan.spec.visible is not None:
        name, text = mask_tables.render(plan.spec)
        tables = f"{name}.py"
        files[tables] = text
    return Sources(kernels, hosts, files, tables)


def emit(plan: Plan, directory: Path | str) -> list[Path]:
    """Write the plan's sources into ``directory``, which is made if missing.

    Returns:
        The paths of the written files.

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
