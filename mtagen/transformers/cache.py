"""The cache that ``generate`` passes from call to call: keys, values and last queries per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..errors import InputError, explain
from ..nn import Cache as LayerCache
from ..nn import MultiTokenAttention
from ..ops.attention import AttentionOp
from .configuration import CACHE_NAMES

_Places: TypeAlias = tuple[slice, slice]  # of entries and tokens
SPARE = 32  # tokens before the last crop that can be taken back, too
# The argument's name under which the installed transformers passes a cache.
CACHE_NAME = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})


def given_cache(cache: MtaCache | None, past_key_values: MtaCache | None) -> MtaCache | None:
    """Return the cache of a call, whichever of its two names was used.

    Raises:
        InputError: both names were used, or the cache is no :class:`MtaCache`.
    """
    if cache is not None and past_key_values is not None:
        raise InputError(explain("cache, past_key_values", "both", "they are two names of one argument", "one of them"))
    cache = past_key_values if cache is None else cache
    if not isinstance(cache, (MtaCache, type(None))):
        rule, legal = "the convolutions need a cache that holds queries, too", "an MtaCache, or None"
        raise InputError(explain("cache", type(cache).__name__, rule, legal))
    return cache


class MtaCacheLayer(CacheLayerMixin):
    """A layer's :class:`mtagen.nn.Cache`, made in the layer's first call. It grows when it is full.

    After :meth:`activate_past_recording` tokens can be taken back (:meth:`crop`): all that came after
    the last crop, and some before them.

    Args:
        max_len: initial room for tokens of each entry; default the tokens of the first call.
        static: whether the room stays, so that one compiled step serves all lengths. The number of
            tokens is then counted on their device.

    Attributes:
        state: the layer's cache, or None before the first call.
        record_past: whether tokens can be taken back.
        is_compileable: whether it is static.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_len: int | None = None, static: bool = False) -> None:
        super().__init__()
        self.max_len, self.is_compileable = max_len, static
        self.state: LayerCache | None = None
        self._count: int | Tensor = 0
        self.record_past = False
        self._since_crop = 0  # tokens

    def attend(
        self, attention: MultiTokenAttention, x: Tensor, positions: Tensor | None, padding: Sequence[int] | None
    ) -> Tensor:
        """Attend to the cached and the next tokens, and add the next tokens to the cache.

        Entries with different amounts of padding are computed one by one.

        Args:
            attention: the layer.
            x: ``(B, N, dim)``, the next tokens.
            positions: ``(1, N)`` or ``(B, N)``, or None to continue each entry's positions.
            padding: for each entry, how many of the N places come before its first token; None for
                no padding.

        Returns:
            ``(B, N, dim)``, zeros in the place of padding.
        """
        at = positions if positions is None or padding is None else positions.expand(x.shape[:2])

        def attend(places: _Places | None, state: LayerCache) -> Tensor:
            positions = None if at is None else _at(places, at)
            out: Tensor = attention(_at(places, x), positions=positions, cache=state)
            return out

        return self._add(partial(attention.new_cache, like=x), attend, x, padding)

    def compute(
        self,
        op: AttentionOp,
        weights: Mapping[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Sequence[int] | None = None,
    ) -> Tensor:
        """Add the next tokens, and return their outputs ``(B, N, H, D)``.

        Args:
            op: the op of the layer.
            weights: arguments of the op by name.
            q: ``(B, N, H, D)``, after the rotary embedding.
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, D)``.
            padding: as in :meth:`attend`.
        """

        def attend(places: _Places | None, state: LayerCache) -> Tensor:
            return state.compute(op, weights, _at(places, q), _at(places, k), _at(places, v))

        def new_cache(batch: int, max_len: int) -> LayerCache:
            heads = q.shape[2], k.shape[2]
            return LayerCache.for_op(op, batch, *heads, max_len, device=k.device, dtype=k.dtype)

        return self._add(new_cache, attend, q, padding)

    def _add(
        self,
        new_cache: Callable[[int, int], LayerCache],
        attend: Callable[[_Places | None, LayerCache], Tensor],
        x: Tensor,
        padding: Sequence[int] | None,
    ) -> Tensor:
        """Attend from the next tokens, and add them to the cache.

        Args:
            new_cache: makes a cache of a number of entries and of tokens.
            attend: returns the outputs of the tokens at some places, None for all, and adds these tokens to a cache.
            x: ``(B, N, ...)``, in the shape of the outputs.
            padding: as in :meth:`attend`.
        """
        batch, count = x.shape[:2]
        compiled = self.is_compileable and torch.compiler.is_compiling()
        state = self.state if compiled and self.state is not None else self._with_room(new_cache, batch, count)
        if self.record_past:
            self._since_crop += count
            state = state.with_spare(max(SPARE, self._since_crop))
        if padding is None:
            out = attend(None, state)
        else:
            outs, states = [], []
            for entry, before in enumerate(padding):
                row = slice(entry, entry + 1)
                entry_state = state.select(torch.tensor([entry], device=state.lengths.device))
                states.append(entry_state)
                if before == count:
                    outs.append(torch.zeros_like(x[row]))
                    continue
                out = attend((row, slice(before, None)), entry_state)
                outs.append(F.pad(out, (0, 0) * (x.ndim - 2) + (before, 0)))
            out, state = torch.cat(outs), LayerCache.cat(states)
        self._count += count
        if self.is_compileable and not compiled:
            state.longest = None  # as in compiled steps, which would else be compiled twice
            self._count = torch.as_tensor(self._count, device=x.device)
            for held in (*(x for x in vars(state).values() if isinstance(x, Tensor)), self._count):
                torch._dynamo.mark_static_address(held)
        self.state, self.is_initialized = state, True
        return out

    @property
    def token_count(self) -> int:
        """Number of tokens of each entry, padding included, as ``generate`` counts them."""
        return int(self._count)

    def _with_room(self, new_cache: Callable[[int, int], LayerCache], batch: int, count: int) -> LayerCache:
        """Return the state with room for ``count`` more tokens: new in the first call, doubled when
        full.

        Raises:
            InputError: it is full and static.
        """
        tokens = self.token_count + count
        if self.is_compileable and tokens > (self.max_len or 0):
            rule = "must fit a static cache"
            raise InputError(explain("tokens", tokens, rule, f"1..{self.max_len}, or static=False"))
        if self.state is None:
            return new_cache(batch, max(tokens, self.max_len or 0))
        more = max(tokens, 2 * self.state.max_len) - self.state.max_len
        if tokens <= self.state.max_len:
            return self.state
        held = self.state.keys, self.state.values, self.state.key_factors
        keys, values, key_factors = (F.pad(x, (0, 0, 0, more)) for x in held)
        return replace(self.state, keys=keys, values=values, key_factors=key_factors)

    def _select(self, entries: Tensor) -> None:
        if self.state is None:
            return
        chosen = self.state.select(entries.to(self.state.lengths.device))
        if self.is_compileable and len(entries) == len(self.state.lengths):  # compiled steps know the addresses
            held: dict[str, Any] = {name: x for name, x in vars(self.state).items() if isinstance(x, Tensor)}
            for name, x in held.items():
                x.copy_(getattr(chosen, name))
            chosen = replace(chosen, **held, captured=self.state.captured)
        self.state = chosen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the entries by those of the chosen beams."""
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
        self.state, self._count, self.is_initialized = None, 0, False
        self.record_past, self._since_crop = False, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of each entry.

        Args:
            tokens_to_remove: minus their number. A positive number is the number of tokens that
                stay, as earlier versions of transformers 5 pass it.

        Raises:
            InputError: the queries before them, which a convolution then needs, are not held.
        """
        given = int(tokens_to_remove)  # some versions of transformers pass a tensor
        count = max(0, self.token_count - given) if given > 0 else -given
        if self.state is not None and self.record_past:
            self.state.remove(count)
            self.state = self.state.with_spare(SPARE)
            self._count -= count
            self._since_crop = 0
        elif count:
            rule = "the cache holds no queries for taking back tokens"
            legal = "0; or call activate_past_recording() before the tokens are processed; or reset()"
            raise InputError(explain("tokens_to_remove", tokens_to_remove, rule, legal))

    def activate_past_recording(self) -> None:
        """Hold more queries from the next call on, so that its tokens can be taken back."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Return the number of tokens of each entry, padding included."""
        return self.token_count

    def get_max_length(self) -> int:
        """Return the room for tokens of each entry if the cache is static, else -1, because it grows without limit."""
        return self.max_len if self.is_compileable and self.max_len is not None else -1

    get_max_cache_shape = get_max_length  # the name in earlier versions of transformers 5

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns of a mask, and the first column."""
        return self.token_count + query_length, 0

    @property
    def batch_size(self) -> int:
        """Number of entries; -1 before the first call."""
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


def _at(places: _Places | None, x: Tensor) -> Tensor:
    """Return the tokens of ``x``, ``(B, N, ...)``, at some places; None for all."""
    return x if places is None else x[places]


def _refuse_update() -> NoReturn:
    rule = "the layer writes keys, values and queries itself"
    raise InputError(explain("update", "keys and values", rule, "calls of an mtagen model with this cache"))


class MtaCache(Cache):
    """The cache of an mtagen model, for ``generate`` and for calls with ``cache``.

    The cache grows as needed unless it is static, holds entries with different amounts of left padding, and can be
    reordered for beam search. After ``activate_past_recording`` the last tokens can be taken back
    (``crop``), as generation with an assistant does: a convolution needs the queries before them.

    Args:
        config: the model's configuration.
        max_len: initial room for tokens of each entry; default the tokens of the first call.
        static: whether there is never more room, so that one compiled step serves all lengths, and
            ``generate`` compiles its steps on a GPU. Compiled steps do not check that there is room.

    Raises:
        InputError: ``static`` is given without ``max_len``.
    """

    layers: list[MtaCacheLayer]

    def __init__(self, config: Any, max_len: int | None = None, *, static: bool = False) -> None:
        if static and max_len is None:
            raise InputError(explain("max_len", max_len, "a static cache needs room from the start", "max_len=..."))
        super().__init__(layers=[MtaCacheLayer(max_len, static) for _ in range(config.num_hidden_layers)])
