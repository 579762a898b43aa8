"""The decoder: transformers' Llama with multi-token attention instead of its attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.utils import can_return_tuple

from ..errors import InputError, SpecError, explain
from ..nn import MultiTokenAttention
from ..nn.parts import Gate, HeadMixer, HeadNorm
from .batching import IMPLEMENTATION, PagedCache, PagedLayer, check_batching, is_paged
from .cache import CACHE_NAME, MtaCache, MtaCacheLayer, given_cache
from .configuration import CACHE_NAMES, MtaConfig
from .padding import Packing, check_position_ids, count_padding, find_documents, given_documents


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
        packing: Packing | None = None,
        cache: MtaCacheLayer | PagedLayer | None = None,
        padding: list[int] | None = None,
    ) -> Tensor:
        """Compute the next hidden states, in the shape of ``hidden_states``, ``(B, N,
        hidden_size)``.

        Args:
            hidden_states: the vector of each token.
            position_ids: positions for the rotary embedding, or None to count.
            packing: the documents of the batch, or None if each row is one document.
            cache: the cache of this layer, or None.
            padding: with a cache, the amount of padding before the first token of each entry.
        """
        x = self.input_layernorm(hidden_states)
        if cache is not None:
            x = cache.attend(self.self_attn, x, position_ids, padding)
        elif packing is not None:
            x = packing.attend(self.self_attn, x, position_ids)
        else:
            x = self.self_attn(x, positions=position_ids)
        x = hidden_states + x
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MtaPreTrainedModel(PreTrainedModel):
    """The base class of mtagen's models in transformers: configuration, initial values, features."""

    config_class = MtaConfig
    config: MtaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["MtaDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = [*CACHE_NAMES]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Refuse attention that is not mtagen's, before transformers advises to ask its authors for it.

        Raises:
            SpecError: another implementation than ``eager``, which is transformers' word for the model's own.
        """
        if attn_implementation not in (None, "eager"):
            rule = "only mtagen's kernels can compute this model's attention"
            legal = "no attn_implementation; backend=... of the configuration says which kernels"
            raise SpecError(explain("attn_implementation", attn_implementation, rule, legal))
        adjusted: str = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        return adjusted

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Accept transformers' word for attention from pages, which continuous batching sets, and ``eager``.

        Raises:
            SpecError: another implementation, as when the model is made.
        """
        implementations = {"paged|eager": IMPLEMENTATION, "eager": "eager"}
        if isinstance(attn_implementation, str) and attn_implementation in implementations:
            self.config._attn_implementation_internal = implementations[attn_implementation]
        else:
            super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise matrices like transformers does, and stages as the identity; keep loaded
        values.
        """
        super()._init_weights(module)
        if isinstance(module, (MultiTokenAttention, Gate, HeadMixer, HeadNorm)):
            loaded = [
                (parameter, parameter.clone())
                for parameter in module.parameters(recurse=False)
                if getattr(parameter, "_is_hf_initialized", False)
            ]
            if isinstance(module, MultiTokenAttention):
                module.reset_stages()
            else:
                module.reset_parameters()
            if isinstance(module, Gate):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
            for parameter, value in loaded:
                parameter.copy_(value)


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
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            rule = "the kernels do not store attention matrices"
            raise InputError(explain("output_attentions", True, rule, False))
        document_options = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_q": max_length_q, "max_length_k": max_length_k}
        for name, value in document_options.items():
            if value is not None and cu_seq_lens_q is None:
                raise InputError(
                    explain(name, value, "is for packed documents", "None, or together with cu_seq_lens_q")
                )
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        (batch, count), device = hidden_states.shape[:2], hidden_states.device
        check_position_ids(position_ids, (batch, count))
        packing, padding, paged = None, None, None
        if is_paged(cache):
            boundaries = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
            longest = {"max_length_q": max_length_q, "max_length_k": max_length_k}
            paged, cache = PagedCache(cache, len(self.layers), count, {**boundaries, **longest, **kwargs}), None
        elif (cache := given_cache(cache, past_key_values)) is None and not use_cache:
            if cu_seq_lens_q is None:
                packing = find_documents((batch, count), device, attention_mask, position_ids, seq_idx)
            elif attention_mask is None:
                packing = given_documents(cu_seq_lens_q, cu_seq_lens_k, max_length_q, batch * count)
            else:
                rule = "packed documents cannot have padding"
                raise InputError(explain("attention_mask", "together with cu_seq_lens_q", rule, "one of them"))
            generates = not torch.is_grad_enabled() and not torch.compiler.is_exporting()  # programs return no caches
            can_cache = packing is None and generates and not self.sees_later_keys
            if use_cache is None and self.config.use_cache and can_cache:
                cache = MtaCache(self.config)
        else:
            cache = MtaCache(self.config) if cache is None else cache
            if seq_idx is not None or cu_seq_lens_q is not None:
                rule = "packed documents cannot use a cache"
                raise InputError(explain("cache", "together with packed documents", rule, "use_cache=False"))
            first = cache.layers[0]
            lengths = None if first.state is None else first.state.lengths
            padding = count_padding((batch, count), device, attention_mask, position_ids, lengths, first.token_count)

        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [hidden_states]
        caches = paged or cache
        for i, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states,
                position_ids=position_ids,
                packing=packing,
                cache=None if caches is None else caches.layers[i],
                padding=padding,
            )
            if output_hidden_states:
                states.append(hidden_states)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=(*states[:-1], hidden_states) if output_hidden_states else None,
            **{CACHE_NAME: cache},
        )


class MtaForCausalLM(MtaPreTrainedModel, GenerationMixin):
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

    def init_continuous_batching(
        self, generation_config: GenerationConfig | None = None, continuous_batching_config: Any = None, **kwargs: Any
    ) -> Any:
        """Make transformers' manager of continuous batching; ``generate_batch`` calls it.

        Args:
            generation_config: as in transformers.
            continuous_batching_config: as in transformers, without ``cpu_offload_space``.
            **kwargs: as in transformers.

        Raises:
            InputError: the configuration moves requests to the CPU.
        """
        check_batching(continuous_batching_config)
        options = {"generation_config": generation_config, "continuous_batching_config": continuous_batching_config}
        return super().init_continuous_batching(**options, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give ``generate`` a cache with queries that has room for all tokens.

        Raises:
            InputError: another cache is asked for, a prompt ends in padding, or an assistant is to
                continue a filled cache.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            rule = "generated tokens would follow padding"
            raise InputError(explain("attention_mask", "padding on the right", rule, "padding on the left"))
        if generation_config.cache_implementation is not None:
            got, rule = generation_config.cache_implementation, "the convolutions need a cache that holds queries, too"
            raise InputError(explain("cache_implementation", got, rule, "None"))
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = MtaCache(self.config, max_cache_length)
        held = model_kwargs.get(CACHE_NAME)
        takes_back = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if takes_back and isinstance(held, MtaCache):
            tokens = held.get_seq_length()
            if tokens and generation_mode == GenerationMode.ASSISTED_GENERATION:
                rule = "generation with an assistant would process the cached tokens again"
                raise InputError(explain("cache", f"{tokens} tokens", rule, "an empty cache, or none"))
            for layer in held.layers:
                layer.activate_past_recording()
