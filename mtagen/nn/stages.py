"""The weights of the op's stages as one module, which tools can name, copy and put back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from .parts import local

if TYPE_CHECKING:
    from .layer import MultiTokenAttention

_HELD = ("mta_kernel", "mta_kernel_after_sm", "head_kernel", "wpsm", "wposm", "sink", "score_parameters")


class Stages(nn.Module):
    """The weights of the op's stages, which the layer holds under the names of the authors' state dicts.

    Tools that train or save parts of a model name modules, and some of these weights are parameters
    of the layer itself. So this module stands for them. It has no parameters, and its call returns
    those of the layer. A copy without the layer, as PEFT makes of its ``modules_to_save``, holds
    copies of them. When such a copy is assigned to ``layer.stages``, as PEFT's merge does, the layer
    takes them over.

    Args:
        layer: the layer that holds the weights; None for a module that holds them itself.
    """

    layer: MultiTokenAttention | None
    weight = None  # PEFT's merge reads it of each module that it puts back

    def __init__(self, layer: MultiTokenAttention | None) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not as a child, which would list the layer's parameters twice

    @property
    def holder(self) -> Any:
        """The module that has the weights as attributes."""
        return self if self.layer is None else self.layer

    def forward(self) -> dict[str, Any]:
        """Return the weights of this rank's heads by the names of the op's arguments."""
        holder = self.holder
        weights = {"weight": holder.mta_kernel, "post_weight": holder.mta_kernel_after_sm}
        held: dict[str, Any] = {name: None if weight is None else local(weight) for name, weight in weights.items()}
        held["head_weight"] = None if holder.wpsm is None else holder.wpsm()
        held["post_head_weight"] = None if holder.wposm is None else holder.wposm()
        if holder.head_kernel is not None:
            held["post_head_weight"] = local(holder.head_kernel).mT
        if holder.sink is not None:
            held["sink"] = local(holder.sink)
        if parameters := holder.score_parameters():
            held["parameters"] = parameters
        return held

    def __deepcopy__(self, memo: dict[int, Any]) -> Stages:
        if id(self.layer) in memo:
            return Stages(memo[id(self.layer)])
        alone = Stages(None)
        for name in _HELD:
            setattr(alone, name, copy.deepcopy(getattr(self.holder, name), memo))
        return alone

    def give(self, layer: MultiTokenAttention) -> None:
        """Make the weights those of a layer."""
        for name in _HELD:
            setattr(layer, name, getattr(self.holder, name))
