"""The decoder in the sizes that the authors of multi-token attention trained, and the attentions to compare.

The sizes 300M to 1B follow the authors' code (facebookresearch/RAM, ``projects/mta``).
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

LLAMA3_VOCABULARY = 128256  # tokens of Llama 3's tokenizer, which the authors trained with
BYTES = 256
KERNEL = (6, 11)


@dataclass(frozen=True)
class Size:
    """Size of a model.

    Attributes:
        dim: elements of a token's vector.
        layers: number of blocks, each of attention and feed-forward network.
        heads: number of query heads. The numbers of key heads and value heads are the same.
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
    """The layer without stages. Calls without a cache use PyTorch's fused attention, without packed documents."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class AuthorsAttention(MultiTokenAttention):
    """The layer in the authors' order of operations over whole score matrices, for comparison.

    Calls with a cache use mtagen's kernels. Calls without a cache support neither packed documents nor dropout.
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
    """Return the attention of a layer.

    ``mta`` and ``authors`` compute the same function, the configuration that the authors trained. Every layer mixes all
    heads before and after the softmax, and norms and gates its outputs. Layers 2, 6, 10, ... also have both
    convolutions. ``talking-heads`` has only the mixing. ``plain`` has none of these stages.

    Args:
        size: the size of the model.
        variant: a key of :data:`ATTENTION`.
        layer: the number of the layer, from 0 on.
        others: further options of the layer, the same for all variants.
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
    """Return a new model.

    Matrices start as normal values with a standard deviation of dim^-1/2. Matrices whose outputs are added to the
    residual path start smaller, by the square root of the number of additions. All other parameters start as PyTorch
    and the layer start them. On the CPU a seed gives the same matrices to all variants.

    Args:
        size: the size of the model, a value of :data:`SIZES` or another.
        variant: the attention, see :func:`make_attention`.
        vocabulary: number of tokens.
        others: see :func:`make_attention`.
    """
    state = torch.get_rng_state()
    attentions = [make_attention(size, variant, layer, **others) for layer in range(size.layers)]
    model = Decoder(vocabulary, attentions, size.hidden)
    # The attentions of different variants draw different numbers. The matrices below must not depend on these numbers.
    torch.set_rng_state(state)
    deviation = size.dim**-0.5
    nn.init.normal_(model.tok_embeddings.weight, std=deviation)
    for name, matrix in model.named_parameters():
        if name.endswith(("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight")):
            nn.init.normal_(matrix, std=deviation)
        elif name.endswith(("wo.weight", "w2.weight")):
            nn.init.normal_(matrix, std=deviation * (2 * size.layers) ** -0.5)
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained values in all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of ``tokens``, ``(B, N + 1)``, except the first of each row."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
