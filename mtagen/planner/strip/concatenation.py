"""Mix small groups of heads after the softmax with the fused kernel of the lowering "tile".

Mixing the probabilities of a group's heads and multiplying them by values is the same as
multiplying each head's probabilities by the values of all heads of its group, side by side, and
mixing these products: sum over g of N[h, g] (P_g V_h). So the forward pass writes no scores. Unlike
those of strips, its cost and its memory grow with the group: m times the values and the outputs for
groups of m heads. Its keys are never split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...errors import PlanError, SpecError
from ...spec import Spec
from ..targets import get_target
from ..tile.candidates import candidates
from ..tile.forward import TileForward
from .stages import Stages


def concatenated(spec: Spec, target: str) -> TileForward | None:
    """Return the fused forward kernel for values side by side; None if there is none."""
    stages = Stages(spec)
    if not stages.mixes_after_alone:
        return None
    assert stages.post_mix
    width = spec.value_head_dim * stages.post_mix.heads
    try:
        fused = candidates("forward", replace(spec, value_head_dim=width, post_mixed_heads=None), get_target(target))[0]
    except (SpecError, PlanError):  # there is no such kernel
        return None
    assert isinstance(fused, TileForward)
    return fused


def rows_of_table(fused: TileForward) -> Iterator[tuple[str, str, str]]:
    """Yield facts for the plan's table."""
    width = fused.spec.value_head_dim
    yield "forward", "values", f"of each head's group side by side, {width} columns, in one fused kernel; then mixed"
    yield from fused.kernel_rows()
