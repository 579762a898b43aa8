"""What an adapter of PEFT trains in a model with stages."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import SpecError, explain
from ..nn.stages import Stages
from .stages import ScoreStages

# Attention's projections: those of the layer, those of transformers' models, of Phi-3 and of Phi.
_PROJECTIONS = ("wq", "wk", "wv", "wo", "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "dense")
# Modules of attention whose weights are trained as they are, because they are few.
_WHOLE = ("stages", "subln", "gate")


def lora_options(model: nn.Module) -> dict[str, Any]:
    """Return arguments of ``peft.LoraConfig``, with which an adapter trains the stages, too.

    A model with ``LoraConfig(**lora_options(model), r=16)`` trains adapters of attention's
    projections, and all weights of the stages, the norm and the gate. PEFT saves both in the
    adapter's file. Without ``modules_to_save``, PEFT freezes the stages.

    Args:
        model: a retrofitted model, an :class:`mtagen.transformers.MtaForCausalLM`, or any other
            module with :class:`mtagen.nn.MultiTokenAttention` in it, quantised or not, without adapters.

    Returns:
        ``target_modules`` and ``modules_to_save``: the names of attention's modules, each after the
        name of its parent, because PEFT compares ends of names, and a router of experts may be a
        ``gate``, too.

    Raises:
        SpecError: the model has no attention with stages.
    """
    names = {
        (path.rpartition(".")[2], child): None  # in the order of the modules
        for path, module in model.named_modules()
        if isinstance(getattr(module, "stages", None), (Stages, ScoreStages))
        for child, _ in module.named_children()
    }
    if not names:
        rule, legal = "has no attention with stages", "a model of retrofit or MtaConfig, before it gets adapters"
        raise SpecError(explain("model", type(model).__name__, rule, legal))

    def named(children: tuple[str, ...]) -> list[str]:
        return [f"{parent}.{child}".lstrip(".") for parent, child in names if child in children]

    return {"target_modules": named(_PROJECTIONS), "modules_to_save": named(_WHOLE)}
