"""The cache of a layer for generation: keys and values of earlier tokens, and the last few queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, explain
from ..ops.attention import AttentionOp
from ..spec import MAX_NEW_TOKENS, Spec, as_int

# Fields with an entry for each sequence
_TENSORS = ("keys", "values", "queries", "key_factors", "query_factors", "lengths", "floors")


@dataclass(eq=False)
class Cache:
    """Keys, values and the last queries of a layer, made by :meth:`MultiTokenAttention.new_cache`.

    A convolved score needs scores of earlier queries. So the cache holds the last queries besides
    keys and values: as many as the convolutions before and after the softmax reach back together,
    cq - 1 each. It also holds ``spare`` older queries, so that :meth:`remove` can take back the last
    tokens, as speculative decoding does. Keys and queries are stored after their rotary embedding.
    Buffers never grow.

    Steps that ``torch.compile`` traces, or that a CUDA graph captures, count tokens on the GPU
    alone, so that one graph serves all lengths. From such a step on, ``captured`` is True, buffers
    are written in place, and ``longest`` is None, because replays of a captured step run nothing on
    the CPU. A call of up to eight tokens then does not check that there is room, and more than
    ``max_len`` tokens are an index error on the GPU.

    Attributes:
        keys: ``(B, Hkv, max_len, D)``.
        values: ``(B, Hkv, max_len, D)``.
        queries: ``(B, H, context + spare, D)``, the last queries of each entry; rows before its first token hold
            anything.
        key_factors: ``(B, H, max_len, F)``, the keys' factors of mixings that depend on tokens, one after the other;
            F is 0 if no mixing does.
        query_factors: ``(B, H, context + spare, F)``, the queries' factors of these mixings.
        lengths: ``(B,)`` int32, number of tokens of each entry. Read it only: a new cache begins anew.
        floors: ``(B,)`` int32; an entry with fewer tokens would need queries that were not held when tokens were last
            taken back.
        longest: the largest of ``lengths``; None while only the GPU knows it.
        ragged: whether ``lengths`` may differ.
        spare: how many tokens may be taken back at most.
        captured: whether a step with this cache was traced or captured.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    key_factors: Tensor
    query_factors: Tensor
    lengths: Tensor
    floors: Tensor
    longest: int | None = 0
    ragged: bool = False
    spare: int = 0
    captured: bool = False

    @classmethod
    def for_op(
        cls,
        op: AttentionOp,
        batch: int,
        heads: int,
        kv_heads: int,
        max_len: int,
        *,
        spare: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Cache:
        """Make an empty cache.

        Args:
            op: the layer's op.
            batch: B, number of sequences.
            heads: H, heads of queries.
            kv_heads: Hkv, heads of keys and values.
            max_len: upper limit of the tokens of a sequence.
            spare: how many of the last tokens may be taken back.
            device, dtype: of keys, values and queries; default PyTorch's.
        """
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        spec = op.plan.spec
        shape = batch, kv_heads, max_len, spec.head_dim
        queries = torch.zeros(batch, heads, spec.context + spare, spec.head_dim, **made)
        lengths = torch.zeros(batch, device=device, dtype=torch.int32)
        keys, values = torch.zeros(shape, **made), torch.zeros(shape, **made)
        of_queries, of_keys = (sum(_widths(spec, token).values()) for token in ("Nq", "Nk"))
        key_factors = torch.zeros(batch, heads, max_len, of_keys, **made)
        query_factors = torch.zeros(batch, heads, spec.context + spare, of_queries, **made)
        tensors = keys, values, queries, key_factors, query_factors, lengths
        return cls(*tensors, torch.zeros_like(lengths), spare=spare)

    @property
    def max_len(self) -> int:
        """Upper limit of an entry's number of tokens."""
        return self.keys.shape[2]

    def read_longest(self) -> int:
        """Return the largest of ``lengths``. The CPU waits for the GPU if only the GPU knows it."""
        if self.longest is not None:
            return self.longest
        longest: int = max(self.lengths.tolist(), default=0)
        self.longest = None if self.captured else longest
        return longest

    def positions(self, count: int) -> Tensor:
        """Return the positions ``(B, count)`` of the next tokens."""
        return self.lengths.unsqueeze(1) + torch.arange(count, device=self.lengths.device)

    def _write(self, k: Tensor, v: Tensor, factors: Sequence[Tensor], begin: int | None) -> None:
        """Write the keys and values ``(B, count, Hkv, D)`` of the next tokens, and the factors of keys.

        Args:
            k, v: the keys and values.
            factors: ``(B, H, count, ...)``, one tensor or none.
            begin: number of tokens of each entry; None if entries differ, or if only the GPU knows.
        """
        count = k.shape[1]
        if begin is not None:
            self.keys.narrow(2, begin, count).copy_(k.transpose(1, 2))
            self.values.narrow(2, begin, count).copy_(v.transpose(1, 2))
            for x in factors:
                self.key_factors.narrow(2, begin, count).copy_(x)
            return
        entries = torch.arange(len(k), device=k.device).unsqueeze(1)
        positions = self.positions(count)
        self.keys[entries, :, positions] = k
        self.values[entries, :, positions] = v
        for x in factors:
            self.key_factors[entries, :, positions] = x.transpose(1, 2)

    def compute(
        self,
        op: AttentionOp,
        weights: Mapping[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        factors: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Add the next tokens, and return their outputs ``(B, N, H, D)``.

        A few tokens are decoded. Steps that are traced or captured read whole buffers, and lengths
        that the GPU reads, so that all of them have the same shapes. Other steps of entries with
        equal lengths read slices, which takes fewer operations. More tokens go through the op's
        forward pass in one call if the entries have equal lengths; the queries before them go with
        them, and their rows of outputs are dropped. Entries of different lengths do not fit the
        tensors of one forward pass, so they are decoded a few tokens at a time.

        Args:
            op: the op of the layer.
            weights: the weights of the op's stages, the sink and the parameters, by name.
            q: ``(B, N, H, D)``, after the rotary embedding.
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, D)``.
            factors: the tokens' factors ``(B, H, N, 2 R + 1)`` of mixings that depend on them, by name.

        Raises:
            InputError: the cache has another dtype; it is unchanged.
        """
        count, context = q.shape[1], op.plan.spec.context
        if q.dtype != self.keys.dtype:
            rule = "must be the dtype of the queries and keys of this call"
            raise InputError(explain("cache.keys.dtype", self.keys.dtype, rule, f"new_cache(..., dtype={q.dtype})"))
        if _is_captured(k):
            self.captured = True
        begin = None if self.captured or self.ragged else self.read_longest()
        of_queries, of_keys = (_widths(op.plan.spec, token) for token in ("Nq", "Nk"))
        self._write(k, v, _beside(factors, of_keys), begin)
        held = torch.cat([self.queries, q.transpose(1, 2)], 2) if self.queries.shape[2] else q.transpose(1, 2)
        queries = held[:, :, self.spare :]
        held_factors = self.query_factors
        if of_queries:
            held_factors = torch.cat([held_factors, *_beside(factors, of_queries)], 2)
        query_factors = held_factors[:, :, self.spare :]

        def factors_of(rows: slice, keys: slice) -> dict[str, Tensor]:
            by_name = _by_name(query_factors[:, :, rows], of_queries)
            return by_name | _by_name(self.key_factors[:, :, keys], of_keys)

        if count <= MAX_NEW_TOKENS or self.ragged:
            parts: list[Any] = []
            for first in range(0, count, MAX_NEW_TOKENS):
                end = min(first + MAX_NEW_TOKENS, count)
                rows = slice(first, end + context)
                if begin is None:
                    used, lengths = slice(None), self.lengths + end
                else:
                    used, lengths = slice(begin + end), None
                keys, values = self.keys[:, :, used], self.values[:, :, used]
                named = {**weights, **factors_of(rows, used)}
                parts.append(op.decode(queries[:, :, rows], keys, values, cache_seqlens=lengths, **named))
            out: Any = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        else:
            longest = self.read_longest()
            earlier = min(context, longest)
            rows, used = slice(context - earlier, None), slice(longest + count)
            named = {**weights, **factors_of(rows, used)}
            out = op(queries[:, :, rows], self.keys[:, :, used], self.values[:, :, used], **named)
            out = out[:, :, earlier:]
        if of_queries:
            self.query_factors.copy_(held_factors[:, :, count:])
        self._advance(count, held[:, :, count:])
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    def _advance(self, count: int, queries: Tensor) -> None:
        """Count the tokens that were written, and store the last queries ``(B, H, context + spare, D)``."""
        self.queries.copy_(queries)
        self.lengths += count
        self.longest = None if self.captured or self.longest is None else self.longest + count

    @property
    def removable(self) -> int:
        """How many tokens may be taken back now. The CPU waits for the GPU."""
        return min((self.lengths - self._floors()).tolist(), default=0)

    def _floors(self) -> Tensor:
        """Return the smallest lengths at which the queries before the next token are still held."""
        return torch.maximum(self.floors, self.lengths - self.spare)

    def remove(self, count: int) -> None:
        """Take back the last tokens of each entry, as if the layer had never been called with them.

        The CPU waits for the GPU.

        Args:
            count: number of tokens, at most ``removable``. Tokens that are added later can be taken
                back in turn.

        Raises:
            InputError: the queries before these tokens are no longer held.
        """
        most, tokens = self.removable, as_int(count)
        if tokens is None or not 0 <= tokens <= most:
            rule = f"the cache holds queries for taking back at most {most} tokens"
            raise InputError(explain("count", count, rule, f"0..{most}; new_cache(..., spare=...) holds more"))
        self.floors.copy_(self._floors())
        for held in (self.queries, self.query_factors):
            held.copy_(held.roll(tokens, 2))
        self.lengths -= tokens
        self.longest = None if self.longest is None else self.longest - tokens

    def with_spare(self, spare: int) -> Cache:
        """Return this cache with another number of spare queries. Use it in the place of this one.

        More are held from the next call on.
        """
        if spare == self.spare:
            return self
        queries, query_factors = (  # fewer rows if the number is negative
            F.pad(x, (0, 0, spare - self.spare, 0)) for x in (self.queries, self.query_factors)
        )
        return replace(self, queries=queries, query_factors=query_factors, floors=self._floors(), spare=spare)

    @classmethod
    def cat(cls, caches: Sequence[Cache]) -> Cache:
        """Return a cache with the entries of several caches of one layer, whose lengths may differ.

        Use it to take prompts of different lengths one by one and to continue them together.

        Raises:
            InputError: ``caches`` is empty or no list, or the caches' ``max_len``, ``spare``, shapes or dtypes differ.
        """
        if isinstance(caches, Cache):
            raise InputError(explain("caches", "a Cache", "must be several caches", "a list of them"))
        sizes = {(cache.max_len, cache.spare) for cache in caches}
        if len(sizes) != 1:
            rule = "must have one max_len and one spare in common"
            got = [f"max_len={max_len}, spare={spare}" for max_len, spare in sorted(sizes)]
            raise InputError(explain("caches", got, rule, "caches of layer.new_cache(batch, max_len, spare=...)"))
        for name in _TENSORS:
            kinds = {(getattr(cache, name).dtype, tuple(getattr(cache, name).shape[1:])) for cache in caches}
            if len(kinds) > 1:
                rule = "must be those of one layer, in one dtype"
                raise InputError(explain(f"{name} of caches", sorted(map(str, kinds)), rule, "caches of one new_cache"))
        tensors: dict[str, Any] = {name: torch.cat([getattr(cache, name) for cache in caches]) for name in _TENSORS}
        counts = [cache.read_longest() for cache in caches]
        ragged = any(cache.ragged or count != counts[0] for cache, count in zip(caches, counts, strict=True))
        ((_, spare),) = sizes
        return cls(**tensors, longest=max(counts), ragged=ragged, spare=spare)

    def select(self, entries: Tensor | Sequence[int]) -> Cache:
        """Return a cache with copies of the entries that ``entries`` lists, in that order.

        Use it to choose beams, and to remove sequences that have ended from a batch.

        Args:
            entries: ``(n,)`` integers; an entry may be listed several times.

        Raises:
            InputError: ``entries`` is no list or tensor of integers, or an entry does not exist.
        """
        entries = torch.as_tensor(entries, device=self.lengths.device)
        if entries.ndim != 1 or entries.is_floating_point():
            got = f"{entries.dtype} {tuple(entries.shape)}"
            raise InputError(explain("entries", got, "must be numbers of entries", "a tensor (n,) of integers"))
        batch = len(self.lengths)
        if not (entries.is_cuda or _is_captured(entries)) and not (entries < batch).all():  # a GPU would have to wait
            raise InputError(
                explain("entries", entries.tolist(), f"the cache has {batch} entries", f"0 to {batch - 1}")
            )
        tensors = {name: getattr(self, name)[entries] for name in _TENSORS}
        ragged, longest = self.ragged and len(entries) > 1, None if self.ragged else self.longest
        return replace(self, **tensors, longest=longest, ragged=ragged, captured=False)


def _is_captured(x: Tensor) -> bool:
    """Return whether torch.compile traces calls, or a CUDA graph captures those on the device of ``x``."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _widths(spec: Spec, tokens: str) -> dict[str, int]:
    """Return the last extent of the factors that queries (Nq) or keys (Nk) have, by name."""
    return {x.name: int(x.shape[-1]) for x in spec.factor_arguments if tokens in x.shape}


def _beside(factors: Mapping[str, Tensor] | None, widths: Mapping[str, int]) -> list[Tensor]:
    """Return a list of one tensor that has the named factors beside each other; an empty list if there are none."""
    named = [(factors or {})[name] for name in widths]
    return [torch.cat(named, -1)] if named else []


def _by_name(x: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the factors that lie beside each other by name."""
    return dict(zip(widths, torch.split(x, [*widths.values()], -1), strict=True)) if widths else {}


class EngineCache(ABC):
    """The cache of an engine that keeps keys and values of many requests in its own memory.

    A layer takes it as the argument ``cache``, computes queries, keys and values of new tokens, and
    leaves the rest to it.
    """

    @abstractmethod
    def compute(self, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add new tokens, and return their outputs ``(B, N, H, D)``.

        Args:
            op: the op of the layer.
            weights: the weights of the op's stages, the sink and the parameters, by name.
            q: ``(B, N, H, D)``, after the rotary embedding.
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, D)``.
        """
