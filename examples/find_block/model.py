"""The two models, which differ in nothing but their attention: multi-token or plain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mtagen.nn import MultiTokenAttention
from mtagen.planner import Backend

from ..decoder import Decoder


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

    @property
    def hidden(self) -> int:
        """Hidden units of the feed-forward network: what 8/3 dim = 683 of dim 256 is rounded up to."""
        return 3 * self.dim


def make_decoder(vocabulary: int, size: Size, kernel: tuple[int, int] | None, device: torch.device) -> Decoder:
    """A model.

    Weights start as normal values of variance 1 / inputs, cut at three standard deviations, and convolutions as the
    identity, so that from one seed multi-token attention and plain attention start as the same function.

    Args:
        vocabulary: different tokens.
        size: of the model.
        kernel: extents of the convolution of all layers; None: plain attention.
        device: where it runs.
    """
    backend: Backend = "auto" if device.type == "cuda" else "torch"
    attentions = [
        MultiTokenAttention(size.dim, size.heads, kernel=kernel, dropout=size.dropout, backend=backend)
        for _ in range(size.layers)
    ]
    model = Decoder(vocabulary, attentions, size.hidden)
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            std = part.weight.shape[1] ** -0.5
            nn.init.trunc_normal_(part.weight, std=std, a=-3 * std, b=3 * std)
    return model.to(device)
