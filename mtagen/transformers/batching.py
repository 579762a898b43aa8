"""transformers' continuous batching: steps of many requests, whose keys and values its cache keeps in pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, explain
from ..nn import MultiTokenAttention
from ..nn.cache import EngineCache
from ..ops.attention import AttentionOp
from ..serving import Rings, Step

try:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
except ImportError:  # transformers before continuous batching
    PagedAttentionCache = None

# transformers builds no mask of all pairs for attention with "flash" in its name.
IMPLEMENTATION = "mtagen_flash"


def is_paged(cache: object) -> bool:
    """Return whether a cache is that of continuous batching."""
    return PagedAttentionCache is not None and isinstance(cache, PagedAttentionCache)


def check_batching(config: Any) -> None:
    """Check the configuration of continuous batching.

    Raises:
        InputError: requests may be moved to the CPU, which moves keys and values without queries.
    """
    space = getattr(config, "cpu_offload_space", 0)
    if space != 0:
        rule = "requests that are moved to the CPU would lose their earlier queries"
        raise InputError(explain("cpu_offload_space", space, rule, 0))


class PagedCache:
    """The cache of one step of continuous batching, for all layers of a model.

    Args:
        cache: transformers' cache.
        layers: number of layers.
        count: new tokens of all requests, padding included.
        arguments: what transformers passes to the model.

    Attributes:
        layers: the part of each layer.

    Raises:
        InputError: the installed transformers has another cache.
    """

    def __init__(self, cache: Any, layers: int, count: int, arguments: Mapping[str, Any]) -> None:
        self._pool, self._count, self._arguments = _pool_of(cache), count, arguments
        if not hasattr(cache, "mtagen_rings"):
            cache.mtagen_rings = {}  # of each layer; they live as long as the pages
            self._pool.after_copies(_copies(cache.mtagen_rings))
        self._rings: dict[int, Rings] = cache.mtagen_rings
        self._cu_seq_k = _of_layers(arguments["cu_seq_lens_k"]).to(torch.int32)
        self._longest = [_of_layers(_either(arguments, f"max_length_{x}", f"max_seqlen_{x}")) for x in ("q", "k")]
        self._steps: dict[tuple[int, ...], Step] = {}
        self.layers = [PagedLayer(self, number) for number in range(layers)]

    def attend(
        self, number: int, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Compute the outputs ``(total, H, D)`` of a layer's new tokens; see :class:`EngineCache`."""
        k, v = (x.transpose(0, 1)[None] for x in (k, v))
        keys, values = self._pool.store(number, k, v, self._arguments)
        if number not in self._rings:
            made: dict[str, Any] = {"device": q.device, "dtype": q.dtype}
            # transformers 5.17 computes the last token of a prompt again even if it lies in a shared page.
            self._rings[number] = Rings.for_op(op, q.shape[1], self._pool.pages, self._pool.size, spare=1, **made)
        step = self._step_of(self._rings[number])
        queries = self._rings[number].append(q, step)
        max_q, max_k = self._longest
        boundaries = {"cu_seq_q": step.cu_seq_q, "cu_seq_k": self._cu_seq_k}
        out: Any = op.varlen(
            queries, keys, values, **boundaries, max_q=max_q + op.plan.spec.context, max_k=max_k, **weights
        )
        new: Tensor = out[step.rows]
        return new

    def _step_of(self, rings: Rings) -> Step:
        """Return where the queries of the step lie; layers with equal sizes of rings share it."""
        if rings.sizes in self._steps:
            return self._steps[rings.sizes]
        read, written = (self._arguments[name][self._pool.group] for name in ("read_index", "write_index"))
        cu_seq_q, cu_seq_k = self._arguments["cu_seq_lens_q"].to(torch.int32), self._cu_seq_k
        # Without earlier tokens transformers reads nothing, and positions count from the first new token.
        begins, places = (cu_seq_k, read) if len(read) else (cu_seq_q, written)

        def page_of(request: Tensor, position: Tensor) -> Tensor:
            pages: Tensor = places[(begins[request] + position).clamp(max=len(places) - 1)] // self._pool.stride
            return pages

        step = self._steps[rings.sizes] = Step.of(rings, cu_seq_q, cu_seq_k.diff(), self._count, page_of)
        return step


class PagedLayer(EngineCache):
    """The part of a :class:`PagedCache` that belongs to one layer."""

    def __init__(self, cache: PagedCache, number: int) -> None:
        self._cache, self._number = cache, number

    def attend(self, attention: MultiTokenAttention, x: Tensor, positions: Tensor | None, padding: Any) -> Tensor:
        """Attend from the new tokens ``(1, total, dim)`` of all requests, as a decoder layer asks for it."""
        out: Tensor = attention(x, positions=positions, cache=self)
        return out

    def compute(
        self, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor, padding: None = None
    ) -> Tensor:
        """Compute outputs; see :class:`EngineCache`. Requests have no padding."""
        out = self._cache.attend(self._number, op, weights, q[0], k[0], v[0])
        return out.unsqueeze(0)


class _Pool(NamedTuple):
    """The part of transformers' cache that mtagen uses. Its names and arguments differ between versions.

    Attributes:
        size: tokens of a page.
        stride: by how much the indices of tokens grow from a page to the next.
        pages: number of pages.
        group: number of the group to which all layers belong.
        store: stores keys and values ``(1, Hkv, total, D)`` of a layer's new tokens, given its number and the arguments
            of the model, and returns those of all tokens of the requests, ``(tokens, Hkv, D)``.
        after_copies: makes the cache call a function of sources and targets after it has copied pages.
    """

    size: int
    stride: int
    pages: int
    group: int
    store: Callable[[int, Tensor, Tensor, Mapping[str, Any]], Sequence[Tensor]]
    after_copies: Callable[[Callable[[list[int], list[int]], None]], None]


def _pool_of(cache: Any) -> _Pool:
    """Describe a cache of transformers.

    Raises:
        InputError: it is of another version, or its layers belong to several groups.
    """
    if hasattr(cache, "layer_to_allocator"):  # transformers 5.24
        groups, describe = {*cache.layer_to_allocator.values()}, _pool_of_allocator
    else:  # transformers 5.17
        groups, describe = {*getattr(cache, "group_cache_managers", ())}, _pool_of_lists
    if len(groups) > 1:
        rule = "its layers belong to several groups, and mtagen knows where the queries of one group lie"
        raise InputError(explain("cache", f"{len(groups)} groups", rule, "a model whose layers are of one type"))
    if not groups:
        rule = "mtagen does not know the cache of this version of transformers"
        raise InputError(explain("cache", type(cache).__name__, rule, "transformers 5.17 or 5.24, or generate"))
    return describe(cache, *groups)


def _pool_of_allocator(cache: Any, group: Any) -> _Pool:
    """Describe a cache of transformers 5.24."""

    def store(number: int, k: Tensor, v: Tensor, arguments: Mapping[str, Any]) -> Sequence[Tensor]:
        names = ("read_index", "write_index", "block_table", "cu_seq_lens_k", "max_length_k")
        stored = cache.update(k, v, number, {name: arguments[name] for name in names})
        return [x[0].transpose(0, 1) for x in stored]

    stride = group.block_physical_stride
    pages = group.cache_tensor.shape[0] * group.rows_per_token // stride + 1
    after = partial(_after, group, "copy_blocks")
    return _Pool(group.tokens_per_page, stride, pages, group.index, store, after)


def _pool_of_lists(cache: Any, group: Any) -> _Pool:
    """Describe a cache of transformers 5.17, which holds the keys and values of each layer in lists."""

    def store(number: int, k: Tensor, v: Tensor, arguments: Mapping[str, Any]) -> Sequence[Tensor]:
        stored: Sequence[Tensor] = cache.update(k, v, number, arguments["read_index"], arguments["write_index"])
        return stored

    size, pages = cache.block_size, cache.key_cache[0].shape[0] // cache.block_size
    return _Pool(size, size, pages, 0, store, partial(_after, cache, "copy_cache"))


def _after(holder: Any, name: str, then: Callable[[list[int], list[int]], None]) -> None:
    """Make a method of an object, which copies pages, call a function after it."""
    copy = getattr(holder, name)

    def copy_both(sources: list[int], targets: list[int]) -> None:
        copy(sources, targets)
        then(sources, targets)

    setattr(holder, name, copy_both)


def _copies(rings: Mapping[int, Rings]) -> Callable[[list[int], list[int]], None]:
    """Return the function that copies the rings of pages, as for several samples of one prompt."""

    def copy_rings(sources: list[int], targets: list[int]) -> None:
        devices = {held.queries.device for held in rings.values()}
        pages = {device: torch.tensor([sources, targets], device=device) for device in devices}
        for held in rings.values():
            held.copy_pages(*pages[held.queries.device])

    return copy_rings


def _of_layers(value: Any) -> Any:
    """Return the value for the only kind of layers."""
    if isinstance(value, Mapping):
        (value,) = value.values()
    return value


def _either(arguments: Mapping[str, Any], name: str, earlier: str) -> Any:
    """Return an argument by its name in transformers 5.24, or in earlier versions."""
    value = arguments.get(name)
    return arguments[earlier] if value is None else value
