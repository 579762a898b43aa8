"""transformers' continuous batching: steps of many requests, whose keys and values its cache keeps in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
_NEEDED = ("block_physical_stride", "tokens_per_page", "rows_per_token", "copy_blocks")  # of the cache's allocators


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
        count: new tokens of all requests, padding included.
        arguments: what transformers passes to the model.

    Raises:
        InputError: the installed transformers has another cache.
    """

    def __init__(self, cache: Any, count: int, arguments: Mapping[str, Any]) -> None:
        self._cache, self._count, self._arguments = cache, count, arguments
        allocators = {*getattr(cache, "layer_to_allocator", {}).values()}
        if len(allocators) != 1 or not all(hasattr(x, name) for x in allocators for name in _NEEDED):
            rule = "mtagen does not know the cache of this version of transformers"
            raise InputError(explain("cache", type(cache).__name__, rule, "transformers 5.24, or generate"))
        (self._allocator,) = allocators
        if not hasattr(cache, "mtagen_rings"):
            cache.mtagen_rings = {}  # of each layer; they live as long as the pages
            _copy_rings_with_blocks(self._allocator, cache.mtagen_rings)
        self._rings: dict[int, Rings] = cache.mtagen_rings
        kind = self._allocator.layer_type
        self._cu_seq_k = arguments["cu_seq_lens_k"][kind].to(torch.int32)
        self._max_k = arguments["max_length_k"][kind]
        self._step: Step | None = None

    def layer(self, number: int) -> PagedLayer:
        """Return the part of a layer."""
        return PagedLayer(self, number)

    def attend(
        self, number: int, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Compute the outputs ``(total, H, D)`` of a layer's new tokens; see :class:`EngineCache`."""
        arguments = {name: self._arguments[name] for name in ("read_index", "write_index", "block_table")}
        boundaries = {name: self._arguments[name] for name in ("cu_seq_lens_k", "max_length_k")}
        rows = (x.transpose(0, 1)[None] for x in (k, v))
        stored = self._cache.update(*rows, number, {**arguments, **boundaries})
        keys, values = (x[0].transpose(0, 1) for x in stored)
        step = self._step_of(self._rings_of(number, op, q))
        queries = self._rings[number].append(q, step)
        out: Any = op.varlen(
            queries,
            keys,
            values,
            cu_seq_q=step.cu_seq_q,
            cu_seq_k=self._cu_seq_k,
            max_q=self._arguments["max_length_q"] + op.plan.spec.context,
            max_k=self._max_k,
            **weights,
        )
        new: Tensor = out[step.rows]
        return new

    def _rings_of(self, number: int, op: AttentionOp, q: Tensor) -> Rings:
        """Return the rings of a layer, made in its first step."""
        if number not in self._rings:
            held = self._allocator
            pages = held.cache_tensor.shape[0] * held.rows_per_token // held.block_physical_stride + 1
            made: dict[str, Any] = {"device": q.device, "dtype": q.dtype}
            self._rings[number] = Rings.for_op(op, q.shape[1], pages, held.tokens_per_page, **made)
        return self._rings[number]

    def _step_of(self, rings: Rings) -> Step:
        """Return where the queries of the step lie; layers with the same context share it."""
        if self._step is not None and self._step.earlier.shape[1] == rings.context:
            return self._step
        index = self._allocator.index
        read, written = (self._arguments[name][index] for name in ("read_index", "write_index"))
        cu_seq_q, cu_seq_k = self._arguments["cu_seq_lens_q"].to(torch.int32), self._cu_seq_k
        # Without earlier tokens transformers reads nothing, and positions count from the first new token.
        begins, places = (cu_seq_k, read) if len(read) else (cu_seq_q, written)
        stride, last = self._allocator.block_physical_stride, len(places) - 1

        def page_of(request: Tensor, position: Tensor) -> Tensor:
            pages: Tensor = places[(begins[request] + position).clamp(max=last)] // stride
            return pages

        self._step = Step.of(rings, cu_seq_q, cu_seq_k.diff(), self._count, page_of)
        return self._step


class PagedLayer(EngineCache):
    """The part of a :class:`PagedCache` that belongs to one layer."""

    def __init__(self, cache: PagedCache, number: int) -> None:
        self._cache, self._number = cache, number

    def attend(self, attention: MultiTokenAttention, x: Tensor, positions: Tensor | None, padding: Any) -> Tensor:
        """Attend from the new tokens ``(1, total, dim)`` of all requests, as a decoder layer asks for it."""
        out: Tensor = attention(x, positions=positions, cache=self)
        return out

    def compute(self, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute outputs; see :class:`EngineCache`."""
        out = self._cache.attend(self._number, op, weights, q[0], k[0], v[0])
        return out.unsqueeze(0)


def _copy_rings_with_blocks(allocator: Any, rings: Mapping[int, Rings]) -> None:
    """Make an allocator copy rings with blocks, as it does for several samples of one prompt."""
    copy = allocator.copy_blocks

    def copy_all(sources: list[int], targets: list[int]) -> None:
        copy(sources, targets)
        for held in rings.values():
            device = held.queries.device
            held.copy_pages(torch.tensor(sources, device=device), torch.tensor(targets, device=device))

    allocator.copy_blocks = copy_all
