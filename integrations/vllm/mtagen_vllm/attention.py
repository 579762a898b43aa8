"""Attention from vLLM's pages: keys and values as vLLM lays them out, and a ring of earlier queries in the padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from mtagen.nn.cache import EngineCache
from mtagen.ops.attention import AttentionOp
from mtagen.ops.pages import check_page_size
from mtagen.serving import Rings, Step
from mtagen.spec import MAX_NEW_TOKENS

from . import BACKEND

PREFERRED_SIZE = 64  # tokens of a page; a ring has the same size in a smaller page, and so a larger share


class MtaBackend(AttentionBackend):
    """Names the classes that compute attention."""

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[MtaImpl]:
        return MtaImpl

    @staticmethod
    def get_builder_cls() -> type[MtaMetadataBuilder]:
        return MtaMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_SIZE)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # equal numbers of new tokens are recognised on the CPU

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)  # the ring of a page follows its keys and values


@dataclass
class MtaMetadata(AttentionMetadata):
    """The requests of a step."""

    common: CommonAttentionMetadata
    steps: dict[tuple[int, ...], Step] = field(default_factory=dict)

    def step_of(self, rings: Rings) -> Step:
        """Return where the queries of the step lie; layers with equal sizes of rings share it."""
        if rings.sizes not in self.steps:
            x = self.common
            boundaries = x.query_start_loc, x.seq_lens, x.num_actual_tokens
            self.steps[rings.sizes] = Step.of_tables(rings, *boundaries, x.block_table_tensor)
        return self.steps[rings.sizes]


class MtaMetadataBuilder(AttentionMetadataBuilder[MtaMetadata]):
    """Makes the metadata of each step."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MtaMetadata:
        return MtaMetadata(common_attn_metadata)


class MtaImpl(AttentionImpl[MtaMetadata]):
    """Computes the attention of a layer.

    Args:
        op: the layer's op.
        weights: returns the weights of the op's stages, the sink and the parameters, by name.
        spare: how many tokens vLLM may take back.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *_: Any,
        op: AttentionOp,
        weights: Callable[[], Mapping[str, Any]],
        spare: int,
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype = "auto"
        self.op, self.weights, self.spare = op, weights, spare

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MtaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens ``(tokens, heads, D)`` in ``kv_cache``, ``(pages, Hkv, size, 2 D)``, and attend."""
        if attn_metadata is None:  # vLLM measures the memory that a step takes
            return output.fill_(0)
        requests = attn_metadata.common
        count, pages = requests.num_actual_tokens, kv_cache.transpose(1, 2)
        k_pages, v_pages = pages[..., : self.head_size], pages[..., self.head_size :]
        rings = Rings.in_padding(self.op, self.num_heads, pages, spare=self.spare)
        step = attn_metadata.step_of(rings)
        stored = {"k": key[:count], "v": value[:count], "k_pages": k_pages, "v_pages": v_pages}
        counts = requests.query_start_loc_cpu.diff()
        is_uniform = bool((counts == requests.max_query_len).all()) and int(counts.sum()) == count
        output[:count] = self.op.paged(
            rings.append(query[:count], step, **stored),
            k_pages,
            v_pages,
            **self.weights(),
            scale=self.scale,
            block_table=requests.block_table_tensor,
            cu_seq_q=None if is_uniform else step.cu_seq_q,
            lengths=requests.seq_lens,
            max_q=requests.max_query_len + rings.context,
            max_k=requests.max_seq_len,
            # A token and its drafts. A larger number would make mixed steps slower.
            decode_threshold=min(1 + self.spare, MAX_NEW_TOKENS),
        )
        return output


class MtaPages(Attention, EngineCache):
    """The pages of a layer, in the memory of vLLM."""

    def compute(self, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute outputs ``(1, tokens, H, D)``; see :class:`EngineCache`.

        vLLM calls :class:`MtaImpl`, which has the op and asks for the weights, because ops of vLLM
        take tensors of tokens only.
        """
        out: Tensor = self(q[0], k[0], v[0])
        return out.view(q.shape)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """Return the size of a page: all layers get the padding that the largest ring needs.

        Raises:
            InputError: the size of pages is not legal.
        """
        spec: Any = super().get_kv_cache_spec(vllm_config)
        check_page_size(spec.block_size, vllm_config.device_config.device_type)
        layers = vllm_config.compilation_config.static_forward_context.values()
        padding = max(layer.ring_bytes for layer in layers if isinstance(layer, MtaPages))
        padded: FullAttentionSpec = replace(spec, page_size_padded=spec.unpadded_page_size_bytes + padding)
        return padded

    @property
    def ring_bytes(self) -> int:
        """Bytes that the ring of a page takes."""
        elements = math.prod(Rings.page_shape(self.impl.op, self.num_heads, spare=self.impl.spare))
        size: int = elements * self.kv_cache_torch_dtype.itemsize
        return size
