"""The decoder: transformers' Llama with multi-token attention instead of its attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.utils import can_return_tuple

from ..errors import InputError, SpecError, explain
from ..nn import MultiTokenAttention
from ..nn.parts import Gate, HeadMixer, HeadNorm
from .batching import PagedLayer
from .cache import CACHE_NAME, MtaCache, MtaCacheLayer
from .calls import Batch, read_call
from .configuration import CACHE_NAMES, MtaConfig
from .features import OwnAttention, OwnGeneration, keep_loaded


class MtaDecoderLayer(GradientCheckpointingLayer):
    """A decoder layer: attention and a feed-forward network, each after a norm, with residuals."""

    def __init__(self, config: MtaConfig, layer: int) -> None:
        super().__init__()
        options = config.attention_options(layer)
        self.self_attn = MultiTokenAttention(config.hidden_size, config.num_attention_heads, **options)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None = None,
        batch: Batch | None = None,
        cache: MtaCacheLayer | PagedLayer | None = None,
    ) -> Tensor:
        """Compute the next hidden states, in the shape of ``hidden_states``, ``(B, N,
        hidden_size)``.

        Args:
            hidden_states: the vector of each token.
            position_ids: positions for the rotary embedding, or None to count.
            batch: the documents and the padding of the batch, or None if it has neither.
            cache: the cache of this layer, or None.
        """
        batch = Batch() if batch is None else batch
        x = self.input_layernorm(hidden_states)
        if cache is not None:
            x = cache.attend(self.self_attn, x, position_ids, batch.padding)
        elif batch.packing is not None:
            x = batch.packing.attend(self.self_attn, x, position_ids)
        else:
            x = self.self_attn(x, positions=position_ids)
        x = hidden_states + x
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MtaPreTrainedModel(OwnAttention, PreTrainedModel):
    """The base class of mtagen's models in transformers: configuration, initial values, features."""

    config_class = MtaConfig
    config: MtaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["MtaDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = [*CACHE_NAMES]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise matrices like transformers does, and stages as the identity; keep loaded
        values.
        """
        super()._init_weights(module)
        if isinstance(module, (MultiTokenAttention, Gate, HeadMixer, HeadNorm)):
            with keep_loaded(module):
                if isinstance(module, MultiTokenAttention):
                    module.reset_stages()
                else:
                    module.reset_parameters()
                if isinstance(module, Gate):
                    nn.init.normal_(module.weight, std=self.config.initializer_range)


class MtaModel(MtaPreTrainedModel):
    """The decoder without an output layer.

    Args:
        config: the model's sizes and options.

    Attributes:
        sees_later_keys: whether a token's output depends on later tokens, so that there is no cache.

    Raises:
        SpecError: an option is not legal.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
        BackendError: the backend cannot be used here.
    """

    def __init__(self, config: MtaConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        layers = [MtaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        self.sees_later_keys = any(layer.self_attn.op.plan.spec.right != 0 for layer in layers)
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MtaCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        past_key_values: MtaCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of the tokens.

        A row of the batch is a document. Another document begins in the row where positions do not
        increase by one, or where ``seq_idx`` changes, as ``DataCollatorWithFlattening`` packs
        documents. Attention and convolutions stay within documents, and do not see padding.

        Args:
            input_ids: ``(B, N)``; with a cache the next tokens of each entry.
            attention_mask: ``(B, N)``, with a cache ``(B, earlier + N)``: 1 for a token, 0 for padding, which may be
                on the left or, without a cache, on the right of a row's tokens.
            position_ids: ``(1, N)`` or ``(B, N)``, positions for the rotary embedding; by default
                they count from 0 in each document, or continue from the cached tokens.
            cache: the cache of earlier tokens; only calls without gradients take and return one.
            inputs_embeds: ``(B, N, hidden_size)`` instead of ``input_ids``.
            use_cache: whether a cache is returned, a new one if none is given. By default the
                configuration decides if no gradients are computed, queries see no later keys, the
                batch has neither padding nor packed documents, and the call is not exported;
                otherwise no cache is returned.
            output_hidden_states: whether the output of the embeddings and of each layer is returned, too.
            output_attentions: not supported, because kernels do not store attention matrices.
            seq_idx: ``(B, N)``, the number of each token's document.
            cu_seq_lens_q: ``(documents + 1,)`` int32 on the same device, where documents begin in the flattened batch.
            cu_seq_lens_k: the same as ``cu_seq_lens_q``; ``DataCollatorWithFlattening`` passes
                both.
            max_length_q: tokens of the longest document.
            max_length_k: the same as ``max_length_q``.
            past_key_values: the name of ``cache`` in transformers before 5.24.
            **kwargs: arguments that transformers passes and this model ignores, e.g.
                ``num_items_in_batch``.

        Raises:
            InputError: an argument does not fit, or asks for an unsupported feature.
        """
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise InputError(
                explain("input_ids, inputs_embeds", got, "exactly one of them must give the tokens", "one of them")
            )
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        arguments = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": cache,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "seq_idx": seq_idx,
            "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k,
            "max_length_q": max_length_q,
            "max_length_k": max_length_k,
            **kwargs,
        }
        can_cache = not self.sees_later_keys
        batch, caches = read_call(self.config, hidden_states, arguments, can_cache=can_cache)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [hidden_states]
        for i, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                position_ids=position_ids,
                batch=batch,
                cache=None if caches is None else caches.layers[i],
            )
            if output_hidden_states:
                states.append(hidden_states)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=(*states[:-1], hidden_states) if output_hidden_states else None,
            **{CACHE_NAME: caches},
        )


class MtaForCausalLM(OwnGeneration, MtaPreTrainedModel, GenerationMixin):
    """The decoder with an output layer: a language model.

    Args:
        config: the model's sizes and options.

    Raises:
        SpecError: an option is not legal, or queries see later keys.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
        BackendError: the backend cannot be used here.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MtaConfig) -> None:
        super().__init__(config)
        self.model = MtaModel(config)
        if self.model.sees_later_keys:
            rule = "the model would predict a token from itself"
            raise SpecError(explain("causal", config.causal, rule, "causal=True, or MtaModel"))
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MtaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: MtaCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of each token's successor, and the loss if labels are given.

        Args:
            input_ids: as in :meth:`MtaModel.forward`, like the other arguments of the base model.
            attention_mask: as in the base model.
            position_ids: as in the base model.
            cache: as in the base model.
            inputs_embeds: as in the base model.
            labels: ``(B, N)``, the tokens again, or -100 for tokens that are not to be predicted.
                The loss is then the mean cross-entropy in nats, as transformers computes it.
            use_cache: as in the base model.
            logits_to_keep: compute logits of this number of last tokens, or of the tokens with
                these indices; 0 means all tokens.
            past_key_values: as in the base model.
            **kwargs: arguments of the base model and the loss.

        Raises:
            InputError: as in the base model.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        selected = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, selected])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )


class MtaForSequenceClassification(GenericForSequenceClassification, MtaPreTrainedModel):
    """The decoder with a linear layer on the last token that is no padding: a classifier of texts."""


class MtaForTokenClassification(GenericForTokenClassification, MtaPreTrainedModel):
    """The decoder with a linear layer on each token: a classifier of tokens."""


class MtaForQuestionAnswering(GenericForQuestionAnswering, MtaPreTrainedModel):
    """The decoder with a linear layer on each token: logits of where an answer begins and ends."""
