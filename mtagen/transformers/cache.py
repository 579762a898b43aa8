"""The cache that ``generate`` hands from call to call: of each layer the keys, the values and the last queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..errors import InputError, explain
from ..nn import Cache as LayerCache
from ..nn import MultiTokenAttention
from .configuration import CACHE_NAMES, MtaConfig

# The name by which the installed transformers passes a cache on.
CACHE_NAME = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})


def given_cache(cache: MtaCache | None, past_key_values: MtaCache | None) -> MtaCache | None:
    """The cache of a call, by whichever name it was given.

    Raises:
        InputError: by both names; another cache than :class:`MtaCache`.
    """
    if cache is not None and past_key_values is not None:
        raise InputError(
            explain("cache, past_key_values", "both", "they are two names of one argument", "one of the two")
        )
    cache = past_key_values if cache is None else cache
    if not isinstance(cache, (MtaCache, type(None))):
        rule, legal = "a convolution needs queries of earlier tokens, too", "an MtaCache, or None"
        raise InputError(explain("cache", type(cache).__name__, rule, legal))
    return cache


class MtaCacheLayer(CacheLayerMixin):
    """A layer's :class:`mtagen.nn.Cache`, made in the layer's first call, which grows where it is full.

    Args:
        max_len: tokens that each entry has room for at first; default those of the first call.

    Attributes:
        state: the layer's cache, or None before the first call.
        seen: tokens of each entry, padding included, as ``generate`` counts them.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, max_len: int | None = None) -> None:
        super().__init__()
        self.max_len = max_len
        self.state: LayerCache | None = None
        self.seen = 0

    def attend(
        self, attention: MultiTokenAttention, x: Tensor, positions: Tensor | None, padding: Sequence[int] | None
    ) -> Tensor:
        """Attend to what the cache holds and to the next tokens, which it then holds as well.

        Entries with different amounts of padding are taken one by one.

        Args:
            attention: the layer.
            x: ``(B, N, dim)``, the next tokens.
            positions: ``(1, N)`` or ``(B, N)``, or None to count on from what each entry holds.
            padding: of each entry, how many of the N come before its first token; None: there are none.

        Returns:
            ``(B, N, dim)``, zeros in the place of padding.
        """
        batch, count, _ = x.shape
        state = self._with_room(attention, batch, self.seen + count)
        if padding is None:
            out: Tensor = attention(x, positions=positions, cache=state)
        else:
            if positions is not None:
                positions = positions.expand(batch, -1)
            outs, states = [], []
            for entry, before in enumerate(padding):
                own, one = slice(entry, entry + 1), state.select(torch.tensor([entry], device=state.lengths.device))
                states.append(one)
                if before == count:
                    outs.append(torch.zeros_like(x[own]))
                    continue
                at = None if positions is None else positions[own, before:]
                outs.append(F.pad(attention(x[own, before:], positions=at, cache=one), (0, 0, before, 0)))
            out, state = torch.cat(outs), LayerCache.cat(states)
        self.state, self.seen, self.is_initialized = state, self.seen + count, True
        return out

    def _with_room(self, attention: MultiTokenAttention, batch: int, tokens: int) -> LayerCache:
        """The state, new in the first call, with room for so many tokens: what is full becomes twice as long."""
        if self.state is None:
            return attention.new_cache(batch, max(tokens, self.max_len or 0))
        more = max(tokens, 2 * self.state.max_len) - self.state.max_len
        if tokens <= self.state.max_len:
            return self.state
        keys, values = (F.pad(x, (0, 0, 0, more)) for x in (self.state.keys, self.state.values))
        return replace(self.state, keys=keys, values=values)

    def _select(self, entries: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(entries.to(self.state.lengths.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the entries of other beams."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry."""
        if self.state is not None:
            self._select(torch.arange(len(self.state.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some entries."""
        self._select(indices)

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.seen, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing if no token is to be removed.

        Raises:
            InputError: any is: the queries before it, which a convolution then needs, are no longer held.
        """
        if tokens_to_remove != 0:
            rule = "queries of earlier tokens are no longer held, so that none can be taken back"
            raise InputError(explain("tokens_to_remove", tokens_to_remove, rule, "0, or reset()"))

    def activate_past_recording(self) -> None:
        """Refuse to prepare for tokens being taken back.

        Raises:
            InputError: always.
        """
        rule = "queries of earlier tokens are not recorded, so that none can be taken back"
        raise InputError(explain("activate_past_recording", "a call", rule, "generation without an assistant"))

    def get_seq_length(self) -> int:
        """Tokens of each entry, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    get_max_cache_shape = get_max_length  # as earlier versions of transformers 5 call it

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a mask has, and the first of them."""
        return self.seen + query_length, 0

    @property
    def batch_size(self) -> int:
        """Entries, -1 before the first call."""
        return -1 if self.state is None else len(self.state.lengths)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        """Refuse keys and values that come without queries.

        Raises:
            InputError: always.
        """
        _refuse_update()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse keys and values that come without queries.

        Raises:
            InputError: always.
        """
        _refuse_update()


def _refuse_update() -> NoReturn:
    rule = "the layer writes keys, values and queries itself"
    raise InputError(explain("update", "keys and values", rule, "calls of an mtagen model with this cache"))


class MtaCache(Cache):
    """What an mtagen model keeps of earlier tokens, for ``generate`` and for calls with ``cache``.

    It grows as needed, holds entries with different amounts of left padding, follows beams, and takes no token back:
    a convolution needs queries that are no longer held.

    Args:
        config: of the model.
        max_len: tokens that each entry has room for before the cache grows; default those of the first call.
    """

    layers: list[MtaCacheLayer]

    def __init__(self, config: MtaConfig, max_len: int | None = None) -> None:
        super().__init__(layers=[MtaCacheLayer(max_len) for _ in range(config.num_hidden_layers)])
