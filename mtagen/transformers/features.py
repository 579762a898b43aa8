"""What all models with mtagen's attention have in common in transformers: which attention, which cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMode

from ..errors import InputError, SpecError, explain
from .batching import IMPLEMENTATION, check_batching
from .cache import CACHE_NAME, MtaCache


@contextmanager
def keep_loaded(module: nn.Module) -> Iterator[None]:
    """Restore the module's own parameters that were loaded, after others were initialised."""
    loaded = [
        (parameter, parameter.clone())
        for parameter in module.parameters(recurse=False)
        if getattr(parameter, "_is_hf_initialized", False)
    ]
    yield
    with torch.no_grad():
        for parameter, value in loaded:
            parameter.copy_(value)


class OwnAttention:
    """A model whose attention only mtagen can compute.

    Attributes:
        own_implementation: transformers' word for this attention in the configuration.
    """

    own_implementation: ClassVar[str] = "eager"
    config: Any

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Refuse attention that is not mtagen's, before transformers advises to ask its authors for it.

        Raises:
            SpecError: another implementation than ``eager``, which is transformers' word for the model's own.
        """
        if attn_implementation not in (None, "eager", self.own_implementation):
            rule = "only mtagen's kernels can compute this model's attention"
            legal = "no attn_implementation; backend=... of the configuration says which kernels"
            raise SpecError(explain("attn_implementation", attn_implementation, rule, legal))
        return self.own_implementation

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Accept the names of this model's attention, and those that continuous batching sets.

        Raises:
            SpecError: another implementation, as when the model is made.
        """
        own = self.own_implementation
        batched = dict.fromkeys(("paged|eager", IMPLEMENTATION, f"paged|{IMPLEMENTATION}"), IMPLEMENTATION)
        implementations = {"eager": own, own: own} | batched
        if isinstance(attn_implementation, str) and attn_implementation in implementations:
            self.config._attn_implementation_internal = implementations[attn_implementation]
        else:
            super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]


class OwnGeneration:
    """A language model that generates with caches of queries, keys and values."""

    config: Any

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
        return super().init_continuous_batching(**options, **kwargs)  # type: ignore[misc]

    def create_masks_for_generate(self, attention_mask: Any, inputs_embeds: Any, **others: Any) -> Any:
        """Return the mask of a prompt as it is, and none for single tokens, which follow no padding.

        ``generate`` asks for it if the cache is static.
        """
        return attention_mask if inputs_embeds.shape[1] > 1 else None

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
        kind = generation_config.cache_implementation
        if kind not in (None, "static"):
            rule = "the convolutions need a cache that holds queries, too"
            raise InputError(explain("cache_implementation", kind, rule, "None or 'static'"))
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = MtaCache(self.config, max_cache_length, static=kind == "static")
        held = model_kwargs.get(CACHE_NAME)
        takes_back = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if takes_back and isinstance(held, MtaCache):
            tokens = held.get_seq_length()
            if tokens and generation_mode == GenerationMode.ASSISTED_GENERATION:
                rule = "generation with an assistant would process the cached tokens again"
                raise InputError(explain("cache", f"{tokens} tokens", rule, "an empty cache, or none"))
            for layer in held.layers:
                layer.activate_past_recording()
