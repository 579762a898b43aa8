"""Add stages of multi-token attention to a decoder that was trained without them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..dtypes import DTypeLike
from ..errors import SpecError, explain
from ..planner import Backend
from ..spec import KeyPadding, Mask
from .families import retrofitted_class
from .stages import NAME


def retrofit(
    model: Any,
    *,
    kernel: tuple[int, int] | None = (6, 11),
    mixed_heads: int | None = None,
    post_kernel: tuple[int, int] | None = None,
    post_mixed_heads: int | None = None,
    key_padding: KeyPadding = "both",
    mask: Mask = "source",
    backend: Backend = "auto",
    compute_dtype: DTypeLike | None = None,
    layer_overrides: Mapping[int, Mapping[str, Any]] | None = None,
) -> Any:
    """Copy a trained model of transformers and give the copy stages over the scores of its attention,
    which start as the identity.

    Until it is trained, the copy computes what the model does. Its class is a subclass of the
    model's: a ``Gemma2ForCausalLM`` becomes an ``MtaGemma2ForCausalLM``. Only the function that
    computes attention changes. Projections, norms, rotary embedding, feed-forward networks and their
    names stay.

    Args:
        model: a model of transformers, of one of the families
            :data:`mtagen.transformers.families.FAMILIES`, with or without an output layer, on any device and of any
            dtype, quantised or not. Weights that optimum-quanto has quantised cannot be copied.
        kernel: as in :class:`mtagen.transformers.MtaConfig`, like all following arguments.
        mixed_heads: as in the configuration.
        post_kernel: as in the configuration.
        post_mixed_heads: as in the configuration.
        key_padding: as in the configuration.
        mask: as in the configuration.
        backend: as in the configuration.
        compute_dtype: as in the configuration.
        layer_overrides: as in the configuration, for stages only.

    Returns:
        The copy on the model's device, in its dtype, and in its mode of training or evaluation. Each
        attention module has its stages as ``stages``.

    Raises:
        SpecError: an option is not legal, the model is of another class, or its attention has a part
            that mtagen does not have; the message says which.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
    """
    options = {name: value for name, value in locals().items() if name != "model"}  # only arguments are local so far
    kind = retrofitted_class(type(model))
    modules = [*model.modules()]
    if any(x.is_meta for x in model.parameters()) and any(hasattr(module, "_hf_hook") for module in modules):
        rule = "its stages would not be on the device that computes"
        legal = "a model that is retrofitted first, and then offloaded"
        raise SpecError(explain("model", "offloaded weights", rule, legal))
    if any(type(module).__module__.startswith("optimum.quanto") for module in modules):
        rule, legal = (
            "weights of optimum-quanto cannot be copied",
            "a model that is retrofitted first, and then quantised",
        )
        raise SpecError(explain("model", "weights of optimum-quanto", rule, legal))
    ours = copy.deepcopy(model)
    ours.__class__ = kind
    config = ours.config  # all modules of the copy share it
    config.__class__ = kind.config_class
    config.set_stages(**options)
    config._attn_implementation_internal = NAME
    # Names of the family's checkpoints, under which transformers would save what it then cannot load.
    vars(ours).pop("_weight_conversions", None)
    ours.add_stages(model.dtype)
    return ours
