"""What a call of a model in transformers asks of its attention: documents, padding, and the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, explain
from .batching import PagedCache, is_paged
from .cache import MtaCache, given_cache
from .padding import Packing, check_position_ids, count_padding, find_documents, given_documents

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, eq=False)
class Batch:
    """Where the tokens of a call lie. All layers share it.

    Attributes:
        packing: the documents of the batch, or None if each row is one document.
        padding: with a cache, the amount of padding before the first token of each entry, or None.
    """

    packing: Packing | None = None
    padding: list[int] | None = None


def read_call(
    config: Any, tokens: Tensor, arguments: Mapping[str, Any], *, can_cache: bool = True
) -> tuple[Batch, MtaCache | PagedCache | None]:
    """Read the arguments of a model without an output layer.

    Args:
        config: the model's configuration.
        tokens: ``(B, N)`` or ``(B, N, hidden_size)``, the tokens of the call or their vectors.
        arguments: the arguments of the call by name, as :meth:`mtagen.transformers.MtaModel.forward` describes them.
        can_cache: whether a cache can serve later tokens, that is, whether queries see no later keys.

    Returns:
        The batch, and the cache to which the call adds its tokens.

    Raises:
        InputError: an argument does not fit, or asks for an unsupported feature.
    """
    given, device = arguments.get, tokens.device
    shape = tokens.shape[0], tokens.shape[1]
    if given("output_attentions") or (given("output_attentions") is None and config.output_attentions):
        rule = "the kernels do not store attention matrices"
        raise InputError(explain("output_attentions", True, rule, False))
    for name in _BOUNDARIES[1:]:
        if given(name) is not None and given("cu_seq_lens_q") is None:
            rule = "is for packed documents"
            raise InputError(explain(name, given(name), rule, "None, or together with cu_seq_lens_q"))
    check_position_ids(given("position_ids"), shape)
    named = {name: given(name) for name in ("cache", "past_key_values")}
    for paged in filter(is_paged, named.values()):
        return Batch(), PagedCache(paged, config.num_hidden_layers, shape[1], arguments)
    cache = given_cache(**named)
    mask, position_ids, seq_idx = given("attention_mask"), given("position_ids"), given("seq_idx")
    packed, use_cache = given("cu_seq_lens_q"), given("use_cache")
    if cache is None and not use_cache:
        if packed is None:
            packing = find_documents(shape, device, mask, position_ids, seq_idx)
        elif mask is None:
            packing = given_documents(packed, given("cu_seq_lens_k"), given("max_length_q"), shape[0] * shape[1])
        else:
            rule = "packed documents cannot have padding"
            raise InputError(explain("attention_mask", "together with cu_seq_lens_q", rule, "one of them"))
        serves = use_cache is None and config.use_cache and can_cache
        generates = not torch.is_grad_enabled() and not torch.compiler.is_exporting()  # programs return no caches
        new = MtaCache(config) if serves and packing is None and generates else None
        return Batch(packing), new
    if torch.is_grad_enabled():
        rule = "generation computes no gradients"
        raise InputError(explain("cache", "gradients enabled", rule, "torch.no_grad() or torch.inference_mode()"))
    if seq_idx is not None or packed is not None:
        rule = "packed documents cannot use a cache"
        raise InputError(explain("cache", "together with packed documents", rule, "use_cache=False"))
    cache = MtaCache(config) if cache is None else cache
    first = cache.layers[0]
    lengths = None if first.state is None else first.state.lengths
    earlier = 0 if mask is None else first.token_count
    return Batch(padding=count_padding(shape, device, mask, position_ids, lengths, earlier)), cache
