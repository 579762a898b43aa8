"""Plan -> source text. Deterministic; decides nothing: the planner has."""

from .triton import emit, render

__all__ = ["emit", "render"]
