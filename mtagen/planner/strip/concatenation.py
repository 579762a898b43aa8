"""Mix small groups of heads after the softmax with the fused kernels of the lowering "tile".

Mixing the probabilities of a group's heads and multiplying them by values is the same as
multiplying each head's probabilities by the values of all heads of its group, side by side, and
mixing these products: sum over g of N[h, g] (P_g V_h). So neither pass writes scores. Unlike those
of strips, its cost and its memory grow with the group: m times the values and the outputs for
groups of m heads. The forward pass never splits its keys.

The forward pass keeps the products, unmixed, for the backward pass. There head g has the gradients
N[h, g] dO_h of the products with each V_h, side by side, and the fused kernel needs nothing else. The
gradient of N[h, g] is the sum over rows of dO_h (P_g V_h).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...errors import PlanError, SpecError
from ...spec import Spec
from ..targets import get_target
from ..tile.candidates import candidates
from ..tile.passes import TilePass
from .stages import Stages


def concatenated(pass_name: str, spec: Spec, target: str) -> TilePass | None:
    """Return the fused kernels of a pass for values side by side, or None if there are none.

    The backward pass serves batches, and no request with gradients of parameters or sinks.
    """
    stages = Stages(spec)
    learns = bool(spec.packed or spec.parameters or spec.sink)
    if not stages.mixes_after_alone or pass_name == "decode" or (pass_name == "backward" and learns):
        return None
    assert stages.post_mix
    try:
        of_values = replace(spec, value_head_dim=spec.value_head_dim * stages.post_mix.heads, post_mixed_heads=None)
        return candidates(pass_name, of_values, get_target(target))[0]
    except (SpecError, PlanError):  # there is no such kernel
        return None


def rows_of_table(fused: TilePass) -> Iterator[tuple[str, str, str]]:
    """Yield facts for the plan's table."""
    width, pass_name = fused.spec.value_head_dim, fused.pass_name
    used = "in one fused kernel; then mixed" if pass_name == "forward" else "whose outputs the forward pass has kept"
    yield pass_name, "values", f"of each head's group side by side, {width} columns, {used}"
    yield from fused.kernel_rows()
