"""Add multi-token attention to a decoder that was trained without it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ..dtypes import DTypeLike
from ..errors import SpecError, explain
from ..planner import Backend
from ..spec import KeyPadding, Mask
from .configuration import MtaConfig
from .modeling import MtaForCausalLM

_NOT_INITIALLY_THE_IDENTITY = (
    *("group_norm", "depth_rescale", "gate", "rope_theta", "frequency_scaling", "window"),
    *("scores", "convolved", "logits", "visible", "parameters", "sink"),
)
# Entries of a Llama's rope_parameters that a FrequencyScaling takes, by their rope_type.
_SCALED_BY: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_PROJECTIONS = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}


def retrofit(
    model: LlamaForCausalLM,
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
) -> MtaForCausalLM:
    """Copy a trained Llama and give the copy multi-token attention, whose stages start as the
    identity.

    Until it is trained, the copy computes what the model does. Elements of its queries and keys are
    in another order: the rotary embedding of transformers' Llama rotates the elements p and p + D /
    2 of a head together, that of the layer 2 p and 2 p + 1.

    Args:
        model: a Llama of transformers, on any device and of any dtype.
        kernel: as in :class:`MtaConfig`, like all following arguments.
        mixed_heads: as in the configuration.
        post_kernel: as in the configuration.
        post_mixed_heads: as in the configuration.
        key_padding: as in the configuration.
        mask: as in the configuration.
        backend: as in the configuration.
        compute_dtype: as in the configuration.
        layer_overrides: as in the configuration, for stages and dropout only. With a norm, a
            gate, a window or another rotary embedding the copy would not compute what the model
            does.

    Returns:
        The copy on the model's device, in its dtype, and in its mode of training or evaluation.

    Raises:
        SpecError: an option is not legal, or the model has biases in its attention or a rotary embedding with a scaling
            that the layer does not have.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
    """
    options = {name: value for name, value in locals().items() if name != "model"}  # only arguments are local so far
    _check_llama(model)
    theirs, rope = model.config, model.config.rope_parameters
    config = MtaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=theirs.num_hidden_layers,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=theirs.head_dim,
        hidden_act=theirs.hidden_act,
        mlp_bias=theirs.mlp_bias,
        max_position_embeddings=theirs.max_position_embeddings,
        initializer_range=theirs.initializer_range,
        rms_norm_eps=theirs.rms_norm_eps,
        use_cache=theirs.use_cache,
        tie_word_embeddings=theirs.tie_word_embeddings,
        rope_theta=rope["rope_theta"],
        frequency_scaling={name: rope[name] for name in _SCALED_BY[rope["rope_type"]]} or None,
        dropout=theirs.attention_dropout,
        pad_token_id=theirs.pad_token_id,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        dtype=model.dtype,
        **options,
    )
    for overrides in config.layer_overrides.values():
        for name in _NOT_INITIALLY_THE_IDENTITY:
            if name in overrides:
                rule = "would change what the trained model computes"
                raise SpecError(explain("layer_overrides", name, rule, "stages over scores, dropout"))
    ours: MtaForCausalLM = MtaForCausalLM._from_config(config, dtype=model.dtype).to(model.device)
    ours.load_state_dict(ours.state_dict() | _renamed(model.state_dict(), config))
    ours.generation_config = copy.deepcopy(model.generation_config)
    ours.train(model.training)
    return ours


def _renamed(state: dict[str, Tensor], config: MtaConfig) -> dict[str, Tensor]:
    """Return a Llama's state dict with the layer's names and its order of rows of queries and keys."""
    renamed = {}
    for name, value in state.items():
        for llama_name, layer_name in _PROJECTIONS.items():
            name = name.replace(f"self_attn.{llama_name}.", f"self_attn.{layer_name}.")
        is_rotated = name.endswith(("self_attn.wq.weight", "self_attn.wk.weight"))
        renamed[name] = interleave(value, config.head_dim) if is_rotated else value
    return renamed


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Move rows p and p + D / 2 of each head to 2 p and 2 p + 1.

    Args:
        weight: ``(heads * D, dim)``, a projection of queries or keys.
        head_dim: D.
    """
    return torch.unflatten(weight, 0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _check_llama(model: object) -> None:
    """Check that the layer can compute a model's attention.

    Raises:
        SpecError: the model is no Llama, or its attention has an option that the layer lacks.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise SpecError(
            explain("model", type(model).__name__, "only Llama's attention is supported", "a LlamaForCausalLM")
        )
    config = model.config
    if config.attention_bias:
        raise SpecError(explain("attention_bias", True, "the layer's projections have no bias", False))
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in _SCALED_BY:
        rule = "the layer's rotary embedding has no such scaling"
        raise SpecError(explain("rope_parameters['rope_type']", rope_type, rule, tuple(_SCALED_BY)))
