"""A decoder around attentions that are given, and how it generates: what the examples share.

Norms and the feed-forward network are those of the authors of multi-token attention (facebookresearch/RAM,
``projects/mta``, which extends Meta's Lingua), and parameters have the names of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtagen.nn import Cache, MultiTokenAttention


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """In the shape of ``x``, ``(..., dim)``."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual path."""

    def __init__(self, attention: MultiTokenAttention, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(attention.dim, eps=1e-5)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(attention.dim, eps=1e-5)
        self.feed_forward = FeedForward(attention.dim, hidden)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """In the shape of ``x``, ``(B, N, dim)``."""
        x = x + self.attention(self.attention_norm(x), cache=cache)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """A language model whose embeddings are its output layer, too.

    Args:
        vocabulary: number of tokens.
        attentions: one for each layer, all of one ``dim``.
        hidden: units of the feed-forward networks.
    """

    def __init__(self, vocabulary: int, attentions: Sequence[MultiTokenAttention], hidden: int) -> None:
        super().__init__()
        dim = attentions[0].dim
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(attention, hidden) for attention in attentions)
        self.norm = nn.RMSNorm(dim, eps=1e-5)

    def forward(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """What each token's successor may be.

        Args:
            tokens: ``(B, N)`` integers; with caches the next ones of each sequence.
            caches: one for each layer, from :meth:`new_caches`.

        Returns:
            Logits ``(B, N, vocabulary)``.
        """
        x = self.tok_embeddings(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, None if caches is None else caches[i])
        return F.linear(self.norm(x), self.tok_embeddings.weight)

    def new_caches(self, batch: int, max_len: int) -> list[Cache]:
        """Empty caches of all layers for sequences of up to ``max_len`` tokens."""
        return [block.attention.new_cache(batch, max_len) for block in self.layers]  # type: ignore[union-attr, operator]


def likeliest(logits: Tensor) -> Tensor:
    """The most probable token ``(B, 1)`` of each of ``(B, vocabulary)``."""
    return logits.argmax(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    count: int,
    choose: Callable[[Tensor], Tensor] = likeliest,
    step: Callable[..., Tensor] | None = None,
) -> Iterator[Tensor]:
    """Take the prompt at once, then token by token, with the layers' caches.

    Args:
        model: on the device of ``prompt``.
        prompt: ``(B, N)`` tokens.
        count: tokens to generate, 1 at least.
        choose: a token ``(B, 1)`` for each row of logits ``(B, vocabulary)``.
        step: computes the logits of a token instead of ``model``, e.g. ``torch.compile(model)``.

    Yields:
        The next tokens ``(B, 1)``, ``count`` times.
    """
    caches = model.new_caches(len(prompt), prompt.shape[1] + count)
    token = choose(model(prompt, caches)[:, -1])
    yield token
    if step is None:
        step = model
    else:  # a compiled step has one graph for all lengths if the device alone counts tokens from its first call on
        for cache in caches:
            cache.longest = None
    for _ in range(count - 1):
        token = choose(step(token, caches)[:, -1])
        yield token
