"""Plan -> source text. Deterministic; decides nothing: the planner has."""

from __future__ import annotations

from pathlib import Path

from ..errors import PlanError, explain
from ..planner.plan import Plan
from . import cuda, triton
from .launch import launch_note

__all__ = ["emit", "sources"]


def sources(plan: Plan) -> dict[str, str]:
    """File name -> content: a CUDA source per pass that CUDA serves, a Python module if Triton serves any.

    Raises:
        PlanError: the plan's backend has no source to render.
    """
    made = {f"{fused.name}.cu": cuda.render(fused) for fused in plan.fused.values()}
    if plan.tiles:
        made[f"{plan.name}.py"] = triton.render(plan)
    if not made:
        raise PlanError(explain("backend", plan.backend, "has no generated source", ("auto", "cuda", "triton")))
    return made


def emit(plan: Plan, directory: Path | str) -> list[Path]:
    """Write the plan's sources into ``directory`` (made if missing), with a note on how CUDA's kernels are launched.

    Returns:
        The paths written.
    """
    files = sources(plan)
    if plan.fused:
        files[f"{plan.name}.md"] = launch_note(plan)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in files]
