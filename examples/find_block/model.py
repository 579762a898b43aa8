"""A small decoder whose attention is multi-token or plain: nothing else differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtagen.nn import Cache, MultiTokenAttention


@dataclass(frozen=True)
class Size:
    """Of a decoder. The defaults are the paper's for this task.

    Attributes:
        dim: elements of a token's vector.
        layers: blocks of attention and feed-forward.
        heads: of each attention.
        dropout: probability that a factor of the values is dropped in training.
    """

    dim: int = 256
    layers: int = 4
    heads: int = 2
    dropout: float = 0.1


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202) with 3 dim hidden elements: what 8/3 dim = 683 of dim 256 is rounded up to."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * dim, bias=False)
        self.w2 = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., dim)`` to the same shape."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and added to what it got."""

    def __init__(self, size: Size, kernel: tuple[int, int] | None, backend: str) -> None:
        super().__init__()
        self.attention = MultiTokenAttention(
            size.dim, size.heads, kernel=kernel, rope_theta=100000.0, dropout=size.dropout, backend=backend
        )
        self.feed_forward = FeedForward(size.dim)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size.dim, eps=1e-5), nn.RMSNorm(size.dim, eps=1e-5)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """``(B, N, dim)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cache=cache)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens to logits of the next ones, with the same embedding at both ends.

    Weights start as normal values of variance 1 / inputs, cut at three standard deviations, and convolutions as the
    identity, so that from one seed multi-token attention and plain attention start as the same function.

    Args:
        vocabulary: different tokens.
        size: of the model.
        kernel: extents of the convolution of all layers; None: plain attention.
        device: where it runs.
    """

    def __init__(self, vocabulary: int, size: Size, kernel: tuple[int, int] | None, device: torch.device) -> None:
        super().__init__()
        backend = "auto" if device.type == "cuda" else "torch"
        self.embedding = nn.Embedding(vocabulary, size.dim)
        self.layers = nn.ModuleList(Block(size, kernel, backend) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                std = part.weight.shape[1] ** -0.5
                nn.init.trunc_normal_(part.weight, std=std, a=-3 * std, b=3 * std)
        self.to(device)

    def forward(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Logits ``(B, N, vocabulary)`` of tokens ``(B, N)``, the next ones of ``caches`` if there are any."""
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[index])
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompts: Tensor, count: int) -> Tensor:
        """The most probable next tokens ``(B, count)`` after prompts ``(B, N)``, one after the other."""
        attentions = [part for part in self.modules() if isinstance(part, MultiTokenAttention)]
        caches = [attention.new_cache(len(prompts), prompts.shape[1] + count) for attention in attentions]
        tokens = [self(prompts, caches)[:, -1:].argmax(2)]
        for _ in range(count - 1):
            tokens.append(self(tokens[-1], caches)[:, -1:].argmax(2))
        return torch.cat(tokens, 1)
