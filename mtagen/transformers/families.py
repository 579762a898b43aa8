"""Models of transformers with stages in their attention: a configuration and classes for each family.

For a class ``XForCausalLM`` of transformers there is ``MtaXForCausalLM``, a subclass, whose
configuration has the model type ``mtagen_x`` and the options of the stages. Importing this module
registers them with the automatic classes of transformers, so that checkpoints load.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..dtypes import DTypeLike
from ..errors import InputError, SpecError, explain
from ..planner import Backend
from ..spec import KeyPadding, Mask
from .batching import IMPLEMENTATION, check_batching
from .configuration import LAYER_OPTIONS, MtaConfig, check_names, checked_overrides, stored_dtype
from .features import OwnAttention, OwnGeneration, keep_loaded
from .stages import NAME, ScoreStages, prepare, withhold_cache

# Model types of transformers whose attention calls an attention function as stages.py describes.
FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
# Options of the stages that a layer may override, by their names in MultiTokenAttention.
STAGE_OPTIONS = ("kernel", "mixed_heads", "post_kernel", "post_mixed_heads", "key_padding", "mask")
_OF_RUNS = ("backend", "compute_dtype")
_OPTIONS = (*STAGE_OPTIONS, *_OF_RUNS, "layer_overrides")
# Options of MultiTokenAttention that stages do not have. rope_theta is transformers' earlier name for rope_parameters.
_OF_LAYERS = tuple(name for name in LAYER_OPTIONS if name not in (*STAGE_OPTIONS, "rope_theta"))
_AUTOMATIC = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


class StagesConfig:
    """The options of stages in the configuration of a family, beside the family's own.

    Args:
        kernel: extents of the convolution before the softmax, as in
            :class:`mtagen.nn.MultiTokenAttention`, like the following arguments.
        mixed_heads: as in the layer.
        post_kernel: as in the layer.
        post_mixed_heads: as in the layer.
        key_padding: as in the layer.
        mask: as in the layer.
        backend: as in the layer. It is an option of this run, not of the trained model.
        compute_dtype: as in the layer, or the dtype's name. It is an option of this run, too.
        layer_overrides: options of :data:`STAGE_OPTIONS` in which layers differ, by the layer's
            number from 0 on.
        **kwargs: options of the family.

    Raises:
        SpecError: ``layer_overrides`` names an unknown layer or option; an option is one that stages of a
            retrofit do not have, or looks like a misspelling of one that they have. Other unknown
            names are kept, as transformers does.
    """

    num_hidden_layers: int

    def __init__(
        self,
        kernel: tuple[int, int] | None = (6, 11),
        mixed_heads: int | None = None,
        post_kernel: tuple[int, int] | None = None,
        post_mixed_heads: int | None = None,
        key_padding: KeyPadding = "both",
        mask: Mask = "source",
        backend: Backend = "auto",
        compute_dtype: DTypeLike | None = None,
        layer_overrides: Mapping[int, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {**locals()}  # only the arguments are local so far
        _check_others(kwargs, inspect.signature(super().__init__).parameters)
        super().__init__(**kwargs)  # of the family's configuration
        self.set_stages(**{name: given[name] for name in _OPTIONS})

    def set_stages(
        self,
        *,
        layer_overrides: Mapping[int, Mapping[str, Any]] | None,
        compute_dtype: DTypeLike | None,
        **options: Any,
    ) -> None:
        """Set the options of the stages; see the class."""
        for name, value in options.items():
            setattr(self, name, value)
        self.compute_dtype = stored_dtype(compute_dtype)
        self.layer_overrides = checked_overrides(layer_overrides, self.num_hidden_layers, STAGE_OPTIONS)

    def stage_options(self, layer: int) -> dict[str, Any]:
        """Return the options of the stages of a layer.

        Args:
            layer: the layer's number, from 0 on.
        """
        options = {name: getattr(self, name) for name in (*STAGE_OPTIONS, *_OF_RUNS)}
        options |= self.layer_overrides.get(str(layer), {})
        return {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}  # JSON has no tuples


def _check_others(others: Mapping[str, Any], theirs: Iterable[str]) -> None:
    """Check the options of a configuration that are none of the stages'.

    Args:
        others: the options by name.
        theirs: names of the family's options.

    Raises:
        SpecError: one would be kept without any effect.
    """
    theirs, defaults = {*theirs}, inspect.signature(MtaConfig).parameters
    for name in _OF_LAYERS:
        given = tuple(others[name]) if isinstance(others.get(name), list) else others.get(name)  # JSON has no tuples
        if given and given != defaults[name].default and name not in theirs:
            rule = "stages that are added to a model have no option of that name"
            raise SpecError(explain(name, others[name], rule, _OPTIONS))
    check_names(others, _OPTIONS, theirs)


class Retrofitted(OwnAttention):
    """A model of transformers with stages in its attention: the base of all classes ``Mta...`` of families."""

    own_implementation: ClassVar[str] = NAME
    config: Any

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)  # type: ignore[call-arg]  # of the family's model
        self.add_stages()

    def add_stages(self, dtype: torch.dtype | None = None) -> None:
        """Give each attention module the stages that the configuration describes.

        Args:
            dtype: dtype of their weights, default PyTorch's.
        """
        model: Any = self
        base: Any = model.base_model
        if base is not model:
            if type(base) in _CLASSES:  # made by a class that knows no stages
                base.__class__ = _CLASSES[type(base)]
                base.add_stages(dtype)
            return
        base.register_forward_pre_hook(prepare, with_kwargs=True)
        for number, layer in enumerate(base.layers):
            attention, options = layer.self_attn, self.config.stage_options(number)
            device = next((x.device for x in attention.parameters()), base.device)  # quantised modules may have none
            attention.stages = ScoreStages(attention, options, device, dtype)
            attention.register_forward_pre_hook(withhold_cache, with_kwargs=True)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise stages as the identity, keep loaded values, and leave the rest to the family."""
        if isinstance(module, ScoreStages):
            with keep_loaded(module):
                module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class RetrofittedGenerator(OwnGeneration, Retrofitted):
    """A language model of transformers with stages in its attention."""

    def init_continuous_batching(self, *arguments: Any, **named: Any) -> Any:
        """Make transformers' manager of continuous batching; ``generate_batch`` calls it.

        Raises:
            InputError: a layer has a window, or as in :class:`mtagen.transformers.MtaForCausalLM`.
        """
        model: Any = self
        windows = {layer.self_attn.stages.window for layer in model.base_model.layers} - {None}
        if windows:
            rule = "transformers' pages hold no keys before a window, which stages of earlier queries need"
            raise InputError(explain("sliding_window", max(windows), rule, "generate"))
        check_batching(named.get("continuous_batching_config"))
        self.config._attn_implementation_internal = IMPLEMENTATION
        return super().init_continuous_batching(*arguments, **named)


def retrofitted_class(kind: type) -> Any:
    """Return the subclass of a class of transformers that has stages.

    Raises:
        SpecError: there is none.
    """
    if kind not in _CLASSES:
        rule, legal = "mtagen knows no place for stages in its attention", f"a model of one of the types {FAMILIES}"
        raise SpecError(explain("model", kind.__name__, rule, legal))
    return _CLASSES[kind]


def _config_class(kind: Any) -> Any:
    """Make the subclass of a family's configuration that has options of stages."""
    name = f"Mta{kind.__name__}"
    documented = {"__module__": __name__, "__doc__": f":class:`transformers.{kind.__name__}` with options of stages."}
    own = {"model_type": f"mtagen_{kind.model_type}", "__init__": StagesConfig.__init__}
    return type(name, (StagesConfig, kind), {**own, **documented})


def _model_class(kind: Any, config_class: Any) -> Any:
    """Make the subclass of a family's model that has stages."""
    name = f"Mta{kind.__name__}"
    documented = {"__module__": __name__, "__doc__": f":class:`transformers.{kind.__name__}` with stages."}
    base = RetrofittedGenerator if issubclass(kind, GenerationMixin) else Retrofitted
    return type(name, (base, kind), {"config_class": config_class, **documented})


def _register(family: str) -> None:
    """Make and register the classes of a family, if the installed transformers has it."""
    if family not in CONFIG_MAPPING:
        return
    theirs = CONFIG_MAPPING[family]
    config_class = _config_class(theirs)
    made = [config_class]
    AutoConfig.register(config_class.model_type, config_class)
    for automatic in _AUTOMATIC:
        kind = automatic._model_mapping.get(theirs, None)
        if kind is not None:
            _CLASSES[kind] = _model_class(kind, config_class)
            made.append(_CLASSES[kind])
            automatic.register(config_class, _CLASSES[kind])
    globals().update({one.__name__: one for one in made})  # pickle looks here


_CLASSES: dict[Any, Any] = {}  # of models, by those of transformers
for _family in FAMILIES:
    _register(_family)
