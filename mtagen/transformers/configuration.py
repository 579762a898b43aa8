"""The configuration of a decoder: sizes as in Llama, and options of its attention, also per layer."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from ..dtypes import DTypeLike
from ..errors import SpecError, explain
from ..expressions.given import canonical, text_of
from ..expressions.parameters import read_parameters
from ..nn import FrequencyScaling
from ..nn.checks import GateKind
from ..planner import Backend
from ..spec import Expression, KeyPadding, Mask

# Names of the cache in calls and outputs of transformers: from 5.24 on, and before.
CACHE_NAMES = ("cache", "past_key_values")

# Options that a layer may override, by their names in MultiTokenAttention.
LAYER_OPTIONS = (
    "kernel",
    "mixed_heads",
    "post_kernel",
    "post_mixed_heads",
    "dynamic_ranks",
    "post_dynamic_ranks",
    "key_padding",
    "group_norm",
    "depth_rescale",
    "gate",
    "rope_theta",
    "frequency_scaling",
    "dropout",
    "window",
    "mask",
    "scores",
    "convolved",
    "logits",
    "visible",
    "parameters",
    "sink",
)

# Options of other models' configurations, with what to pass here instead. transformers stores unknown options without
# a check, so a configuration with these would describe something that the model does not do.
_ELSEWHERE = {
    "attention_bias": "no biases in attention",
    "attention_dropout": "dropout=...",
    "constants": "parameters of the layer, after requires_grad_(False)",
    "rope_parameters": "rope_theta=..., frequency_scaling={'factor': ...}",
    "rope_scaling": "frequency_scaling={'factor': ...}",
    "sliding_window": "window=(keys before its own, -1)",
}
# Names that the layer, the op or other code has for sizes.
_SIZES = {
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "n_kv_heads": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
}
# An unknown name that is as similar as this to one of ours is refused: "kernal" is, "attention_dropout" is not.
_LIKENESS = 0.8


class MtaConfig(PreTrainedConfig):
    """Sizes of a decoder, named as in ``LlamaConfig``, and options of its attention, named as in
    the layer.

    The defaults are the sizes of the authors' 300M model with the layer's default stage, the convolution before the
    softmax, in every layer. Options are checked when a model is made.

    Args:
        vocab_size: number of tokens.
        hidden_size: elements of a token's vector.
        intermediate_size: hidden units of the feed-forward network.
        num_hidden_layers: layers, each of attention and a feed-forward network.
        num_attention_heads: heads of queries.
        num_key_value_heads: heads of keys and values, a divisor of num_attention_heads; default the
            same number.
        head_dim: elements of a head's vector; default hidden_size / num_attention_heads.
        hidden_act: activation of the feed-forward network, a name that transformers knows.
        mlp_bias: whether the feed-forward network's matrices have biases.
        max_position_embeddings: number of tokens that the model was trained with. Only other tools
            read it.
        initializer_range: initial standard deviation of matrices and embeddings; stages start as
            the identity.
        rms_norm_eps: epsilon of the norms before attention, before the feed-forward network, and at
            the end.
        use_cache: whether calls without gradients, padding and packed documents return a cache by default.
        tie_word_embeddings: whether the output layer shares the embeddings' matrix.
        kernel: extents of the convolution before the softmax. This argument and the following ones
            are those of :class:`mtagen.nn.MultiTokenAttention`.
        mixed_heads: as in the layer.
        post_kernel: as in the layer.
        post_mixed_heads: as in the layer.
        dynamic_ranks, post_dynamic_ranks: as in the layer, which then takes no padded batches.
        key_padding: as in the layer.
        group_norm: as in the layer.
        depth_rescale: whether the norm rescales by the layer's number.
        gate: as in the layer.
        rope_theta: as in the layer.
        frequency_scaling: the fields of a :class:`mtagen.nn.FrequencyScaling` by their names, e.g. ``{"factor": 2.0}``.
        dropout: as in the layer.
        window: as in the layer.
        scores, convolved, logits, visible: as in the layer; the configuration keeps the texts.
        parameters, sink: as in the layer.
        causal: as in the layer; ``MtaForCausalLM`` needs True, or a window that ends at a query's
            own position.
        mask: as in the layer.
        backend: as in the layer. It is an option of this run, not of the trained model.
        compute_dtype: as in the layer, or the dtype's name, e.g. ``float32``; saved as the name. It
            is an option of this run, too.
        layer_overrides: options of :data:`LAYER_OPTIONS` in which layers differ, by the layer's
            number from 0 on, e.g. ``{2: {"kernel": (6, 11)}}``.
        pad_token_id: token of padding, whose embedding is not trained.
        bos_token_id: token that begins a text.
        eos_token_id: token that ends a text.
        **kwargs: as in ``PreTrainedConfig``.

    Raises:
        SpecError: ``layer_overrides`` names an unknown layer or option; an option has the name that it
            has in other models, or looks like a misspelling of one of these arguments;
            ``num_attention_heads`` does not divide ``hidden_size`` and ``head_dim`` is None;
            ``num_key_value_heads`` does not divide ``num_attention_heads``. Other unknown names are
            kept, as transformers does.
    """

    model_type: ClassVar[str] = "mtagen"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [*CACHE_NAMES]

    def __init__(
        self,
        vocab_size: int = 128256,
        hidden_size: int = 1024,
        intermediate_size: int = 2816,
        num_hidden_layers: int = 20,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        mlp_bias: bool = False,
        max_position_embeddings: int = 2048,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-5,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        kernel: tuple[int, int] | None = (6, 11),
        mixed_heads: int | None = None,
        post_kernel: tuple[int, int] | None = None,
        post_mixed_heads: int | None = None,
        dynamic_ranks: tuple[int, int] | None = None,
        post_dynamic_ranks: tuple[int, int] | None = None,
        key_padding: KeyPadding = "both",
        group_norm: bool = False,
        depth_rescale: bool = False,
        gate: GateKind | None = None,
        rope_theta: float | None = 100000.0,
        frequency_scaling: Mapping[str, float] | None = None,
        dropout: float = 0.0,
        window: tuple[int, int] = (-1, -1),
        causal: bool = True,
        mask: Mask = "source",
        scores: Expression | None = None,
        convolved: Expression | None = None,
        logits: Expression | None = None,
        visible: Expression | None = None,
        parameters: Mapping[str, str] | None = None,
        sink: bool = False,
        backend: Backend = "auto",
        compute_dtype: DTypeLike | None = None,
        layer_overrides: Mapping[int, Mapping[str, Any]] | None = None,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, legal in _ELSEWHERE.items():
            if kwargs.get(name):
                raise SpecError(explain(name, kwargs[name], "this model has no option of that name", legal))
        ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (MtaConfig, PreTrainedConfig))
        check_names(kwargs, ours, theirs, _SIZES)
        if head_dim is None and hidden_size % num_attention_heads:
            rule = f"is no multiple of num_attention_heads = {num_attention_heads}"
            raise SpecError(explain("hidden_size", hidden_size, rule, "a multiple, or head_dim=..."))
        if num_key_value_heads is not None and num_attention_heads % num_key_value_heads:
            rule, got = f"must divide num_attention_heads = {num_attention_heads}", num_key_value_heads
            raise SpecError(explain("num_key_value_heads", got, rule, "a divisor, or None for as many"))
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.hidden_act = hidden_act
        self.mlp_bias = mlp_bias
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.kernel = kernel
        self.mixed_heads = mixed_heads
        self.post_kernel = post_kernel
        self.post_mixed_heads = post_mixed_heads
        self.dynamic_ranks = dynamic_ranks
        self.post_dynamic_ranks = post_dynamic_ranks
        self.key_padding = key_padding
        self.group_norm = group_norm
        self.depth_rescale = depth_rescale
        self.gate = gate
        self.rope_theta = rope_theta
        self.frequency_scaling = frequency_scaling
        self.dropout = dropout
        self.window = window
        self.parameters = dict(parameters or {})
        read = read_parameters(self.parameters)
        self.scores, self.convolved, self.logits = (  # as texts, because JSON has no functions
            None if given is None else canonical(name, given, read)
            for name, given in (("scores", scores), ("convolved", convolved), ("logits", logits))
        )
        self.visible = None if visible is None else text_of("visible", visible, read, has_integers=True)
        self.sink = sink
        self.causal = causal
        self.mask = mask
        self.backend = backend
        self.compute_dtype = stored_dtype(compute_dtype)
        self.layer_overrides = checked_overrides(layer_overrides, num_hidden_layers, LAYER_OPTIONS)
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        super().__init__(**kwargs)

    def attention_options(self, layer: int) -> dict[str, Any]:
        """Return the keyword arguments of a layer's attention, except device and dtype.

        Args:
            layer: the layer's number, from 0 on.
        """
        options = {name: getattr(self, name) for name in LAYER_OPTIONS} | self.layer_overrides.get(str(layer), {})
        for name in ("kernel", "post_kernel", "window", "dynamic_ranks", "post_dynamic_ranks"):  # JSON has no tuples
            options[name] = tuple(options[name]) if isinstance(options[name], list) else options[name]
        options["depth_rescale"] = layer if options["depth_rescale"] else None
        options["frequency_scaling"] = _frequency_scaling(options["frequency_scaling"])
        return options | {
            "n_kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "backend": self.backend,
            "compute_dtype": self.compute_dtype,
        }


def check_names(
    others: Mapping[str, Any], ours: Iterable[str], theirs: Iterable[str], renamed: Mapping[str, str] | None = None
) -> None:
    """Check the options of a configuration that are none of its arguments.

    Most of them are options of transformers or of another version of mtagen.

    Args:
        others: the options by name.
        ours: names of arguments.
        theirs: further names that the configuration knows.
        renamed: the right names of options that have other names elsewhere.

    Raises:
        SpecError: an option looks like a misspelling of ours, and would be kept without any effect.
    """
    ours, theirs, renamed = [*ours], {*theirs}, renamed or {}
    for name, value in others.items():
        if name in theirs or name.endswith("_token_id"):  # transformers has many of the latter
            continue
        alike = [renamed[name]] if name in renamed else difflib.get_close_matches(name, ours, 1, _LIKENESS)
        if alike:
            raise SpecError(explain(name, value, "this model has no option of that name", f"{alike[0]}=..."))


def _frequency_scaling(fields: Mapping[str, float] | None) -> FrequencyScaling | None:
    """Make the layer's argument from a mapping of fields.

    Raises:
        SpecError: a field is unknown, or its value is not legal.
    """
    if fields is None:
        return None
    names = [field.name for field in dataclasses.fields(FrequencyScaling)]
    if not (isinstance(fields, Mapping) and "factor" in fields and set(fields) <= {*names}):
        raise SpecError(
            explain("frequency_scaling", fields, "must map names of fields to values, and have factor", names)
        )
    return FrequencyScaling(**fields)  # type: ignore[arg-type]  # it checks them


def stored_dtype(dtype: DTypeLike | None) -> str | None:
    """Return a dtype's name, because JSON has no dtypes."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def checked_overrides(
    overrides: Mapping[Any, Mapping[str, Any]] | None, layers: int, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the overrides with layers' numbers as strings, as JSON has them.

    Args:
        overrides: options by the layer's number.
        layers: number of layers.
        names: options that a layer may override.

    Raises:
        SpecError: a layer or an option does not exist.
    """
    overrides = overrides or {}
    if not (isinstance(overrides, Mapping) and all(isinstance(options, Mapping) for options in overrides.values())):
        rule = "must map layers' numbers to their options"
        raise SpecError(explain("layer_overrides", overrides, rule, '{2: {"kernel": (6, 11)}}'))
    checked = {str(layer): dict(options) for layer, options in overrides.items()}
    for layer, options in checked.items():
        if not (layer.isdecimal() and int(layer) < layers):
            raise SpecError(explain("layer_overrides", layer, "the model has no such layer", f"0..{layers - 1}"))
        for name in options:
            if name not in names:
                rule = f"layer {layer} cannot override this option"
                raise SpecError(explain("layer_overrides", name, rule, tuple(names)))
    return checked
