"""The decoder that all examples share, and its generation. The caller passes the attention of each layer.

The norms, the feed-forward network and the names of parameters are those of the authors of multi-token attention
(facebookresearch/RAM, ``projects/mta``, which extends Meta's Lingua).
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
        """Return the network's output for ``x``, both ``(..., dim)``."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention, then a feed-forward network; each follows a norm and is added to the residual path."""

    def __init__(self, attention: MultiTokenAttention, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(attention.dim, eps=1e-5)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(attention.dim, eps=1e-5)
        self.feed_forward = FeedForward(attention.dim, hidden)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the block's output for ``x``, both ``(B, N, dim)``."""
        x = x + self.attention(self.attention_norm(x), cache=cache)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """A language model with tied embeddings: the embedding matrix is also the output layer.

    Args:
        vocabulary: number of tokens.
        attentions: the attention of each layer, all with the same ``dim``.
        hidden: hidden units of each feed-forward network.
    """

    def __init__(self, vocabulary: int, attentions: Sequence[MultiTokenAttention], hidden: int) -> None:
        super().__init__()
        dim = attentions[0].dim
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(attention, hidden) for attention in attentions)
        self.norm = nn.RMSNorm(dim, eps=1e-5)

    def forward(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Return the logits of each token's successor.

        Args:
            tokens: ``(B, N)`` integers. With caches these are the next tokens of each sequence.
            caches: the cache of each layer, from :meth:`new_caches`.

        Returns:
            Logits ``(B, N, vocabulary)``.
        """
        x = self.tok_embeddings(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, None if caches is None else caches[i])
        return F.linear(self.norm(x), self.tok_embeddings.weight)

    def new_caches(self, batch: int, max_len: int) -> list[Cache]:
        """Return an empty cache for each layer, for sequences of up to ``max_len`` tokens."""
        return [block.attention.new_cache(batch, max_len) for block in self.layers]  # type: ignore[union-attr, operator]


def likeliest(logits: Tensor) -> Tensor:
    """Return the most probable token of each row of logits ``(B, vocabulary)``, as ``(B, 1)``."""
    return logits.argmax(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    count: int,
    choose: Callable[[Tensor], Tensor] = likeliest,
    step: Callable[..., Tensor] | None = None,
) -> Iterator[Tensor]:
    """Generate tokens with the layers' caches: the prompt in one call of the model, then one call for each token.

    Args:
        model: the decoder, on the device of ``prompt``.
        prompt: ``(B, N)`` tokens.
        count: number of tokens to generate, at least 1.
        choose: returns a token ``(B, 1)`` for each row of logits ``(B, vocabulary)``.
        step: computes the logits of each token after the first, e.g. ``torch.compile(model)``; None: ``model`` does.

    Yields:
        The next tokens ``(B, 1)``, ``count`` times.
    """
    caches = model.new_caches(len(prompt), prompt.shape[1] + count)
    token = choose(model(prompt, caches)[:, -1])
    yield token
    if step is None:
        step = model
    else:  # a compiled step has one graph for all lengths only if the device alone counts tokens from the first call
        for cache in caches:
            cache.longest = None
    for _ in range(count - 1):
        token = choose(step(token, caches)[:, -1])
        yield token
