"""What an adapter of PEFT trains in a model of mtagen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import SpecError, explain
from .retrofit import _PROJECTIONS

# Modules of the layer whose weights are trained as they are, because they are few.
_STAGES = ("stages", "subln", "gate")


def lora_options(target_modules: Sequence[str] = tuple(_PROJECTIONS)) -> dict[str, Any]:
    """Return arguments of ``peft.LoraConfig``, with which an adapter trains the stages, too.

    A model with ``LoraConfig(**lora_options(), r=16)`` trains adapters of the attention's four
    projections, and all weights of its stages. PEFT saves both in the adapter's file. Without
    ``modules_to_save``, PEFT freezes the stages.

    Args:
        target_modules: names of the modules that get adapters. Llama's names of the attention's
            projections, such as ``q_proj``, stand for the layer's, such as ``wq``. ``all-linear``
            is every ``torch.nn.Linear`` but the output layer.

    Returns:
        ``target_modules`` and ``modules_to_save``.

    Raises:
        SpecError: ``target_modules`` is another string, which PEFT would match as a regular expression.
    """
    if isinstance(target_modules, str):
        if target_modules != "all-linear":
            rule = "must be names, because PEFT takes a string for a regular expression"
            raise SpecError(explain("target_modules", target_modules, rule, f"['{target_modules}'], or 'all-linear'"))
        targets: str | list[str] = target_modules
    else:
        targets = [_PROJECTIONS.get(name, name) for name in target_modules]
    return {"target_modules": targets, "modules_to_save": [*_STAGES]}
