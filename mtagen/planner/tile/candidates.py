"""The plans of each pass of the lowering "tile"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...spec import Spec
from ..cuda.toeplitz import FLOP_OF_MMA, toeplitz
from ..passes import Fields
from ..targets import Target, get_target
from .backward import TileBackward
from .decode import TileDecode
from .forward import TileForward
from .passes import TilePass, ranked

_KINDS: Mapping[str, type[TilePass]] = {kind.pass_name: kind for kind in (TileForward, TileBackward, TileDecode)}


def candidates(pass_name: str, spec: Spec, target: Target) -> Sequence[TilePass]:
    """Return the plans of a pass that fit the target, the cheapest by the cost model first.

    Raises:
        PlanError: no plan fits; the message names the limit.
    """
    return ranked(_KINDS[pass_name], spec, target)


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> TilePass:
    """Return the plan with these decisions.

    Raises:
        PlanError: no candidate has these decisions.
    """
    plan = candidates(pass_name, spec, get_target(target))[0]
    for key, fields in decisions.items():
        plan = plan.decided(key, fields)
    return plan


def flop_per_score(pass_name: str, spec: Spec) -> int:
    """Return the flop per (row, key) pair of a training pass, 2 per multiply-add.

    The forward pass has one convolution. The backward pass has three: of the scores, the adjoint of
    their gradients, and the gradient of the weight.
    """
    d, dv, convolution = spec.head_dim, spec.value_head_dim, toeplitz(spec.cq, spec.ck)
    if pass_name == "forward":
        return 2 * (d + dv) + FLOP_OF_MMA * convolution.mma_of_scores
    return 2 * (3 * d + 2 * dv) + FLOP_OF_MMA * (convolution.mma_of_scores + 2 * convolution.mma_per_tile)
