"""The decoder, in the sizes that the authors of multi-token attention trained, and the attention it is compared with.

Sizes follow their code (facebookresearch/RAM, ``projects/mta``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtagen.bench.authors import authors_attention
from mtagen.nn import MultiTokenAttention

from ..decoder import Decoder

LLAMA3_VOCABULARY = 128256  # of the tokenizer that the authors trained with
BYTES = 256
KERNEL = (6, 11)


@dataclass(frozen=True)
class Size:
    """Extents of a model.

    Attributes:
        dim: of a token's vector.
        layers: blocks of attention and feed-forward network.
        heads: of queries, and as many of keys and values.
    """

    dim: int
    layers: int
    heads: int

    @property
    def hidden(self) -> int:
        """Hidden units of the feed-forward network: 8/3 dim, rounded up to a multiple of 256."""
        return -(-(8 * self.dim // 3) // 256) * 256


SIZES = {
    "tiny": Size(64, 4, 4),
    "small": Size(256, 8, 4),
    "30M": Size(512, 8, 8),
    "300M": Size(1024, 20, 16),
    "550M": Size(1280, 24, 10),
    "830M": Size(1536, 24, 16),
    "1B": Size(2048, 24, 16),
}


class PlainAttention(MultiTokenAttention):
    """The layer without stages, by PyTorch's fused attention where there is no cache. Documents are not packed."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class AuthorsAttention(MultiTokenAttention):
    """The layer with the authors' order of operations over whole scores where there is no cache, for comparison.

    Documents are not packed, and nothing is dropped.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.attend = authors_attention(self.op.plan.spec)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = self.attend(
            q,
            k,
            v,
            None if self.mta_kernel is None else self.mta_kernel.squeeze(1),
            head_weight=None if self.wpsm is None else self.wpsm.weight.unsqueeze(0),
            post_weight=None if self.mta_kernel_after_sm is None else self.mta_kernel_after_sm.squeeze(1),
            post_head_weight=None if self.wposm is None else self.wposm.weight.unsqueeze(0),
        )
        return out.transpose(1, 2)


ATTENTION: dict[str, type[MultiTokenAttention]] = {
    "mta": MultiTokenAttention,
    "talking-heads": MultiTokenAttention,
    "plain": PlainAttention,
    "authors": AuthorsAttention,
}


def make_attention(size: Size, variant: str, layer: int, **others: Any) -> MultiTokenAttention:
    """The attention of a layer.

    ``mta`` and ``authors`` compute the same, the authors' trained configuration: all heads are mixed before and after
    the softmax, outputs are normed and gated in every layer, and every fourth layer, from 2 on, has both convolutions.
    ``talking-heads`` has the mixing alone, ``plain`` none of it.

    Args:
        size: the model's.
        variant: a key of :data:`ATTENTION`.
        layer: its number, from 0 on.
        others: options of the layer that all models may have.
    """
    options: dict[str, Any] = {"kernel": None} | others
    if variant != "plain":
        options |= {"mixed_heads": size.heads, "post_mixed_heads": size.heads}
    if variant in ("mta", "authors"):
        options |= {"group_norm": True, "gate": "scalar"}
        if layer % 4 == 2:
            options |= {"kernel": KERNEL, "post_kernel": KERNEL}
    return ATTENTION[variant](size.dim, size.heads, **options)


def make_decoder(size: Size, variant: str = "mta", vocabulary: int = BYTES, **others: Any) -> Decoder:
    """A model.

    Matrices start as normal with a deviation of dim^-1/2, those that add to the residual path with one that is smaller
    by the square root of the number of additions; all else starts as PyTorch and the layer start it. On the CPU a
    seed gives the same matrices to all variants.

    Args:
        size: a value of :data:`SIZES`, or another.
        variant: of the attention, see :func:`make_attention`.
        vocabulary: number of tokens.
        others: as of :func:`make_attention`.
    """
    state = torch.get_rng_state()
    attentions = [make_attention(size, variant, layer, **others) for layer in range(size.layers)]
    model = Decoder(vocabulary, attentions, size.hidden)
    torch.set_rng_state(state)  # so that a seed gives the same matrices to all variants, whatever else they draw
    deviation = size.dim**-0.5
    nn.init.normal_(model.tok_embeddings.weight, std=deviation)
    for name, matrix in model.named_parameters():
        if name.endswith(("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight")):
            nn.init.normal_(matrix, std=deviation)
        elif name.endswith(("wo.weight", "w2.weight")):
            nn.init.normal_(matrix, std=deviation * (2 * size.layers) ** -0.5)
    return model


def count_parameters(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross-entropy, in nats, of each token of ``(B, N + 1)`` but the first, given those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
