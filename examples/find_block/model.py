"""The two models. They differ only in their attention, which is multi-token or plain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mtagen.nn import MultiTokenAttention
from mtagen.planner import Backend

from ..decoder import Decoder


@dataclass(frozen=True)
class Size:
    """Size of a decoder. The defaults are the paper's for this task.

    Attributes:
        dim: elements of a token's vector.
        layers: number of blocks, each of attention and feed-forward network.
        heads: number of heads in each attention.
        dropout: probability that training drops an attention probability.
    """

    dim: int = 256
    layers: int = 4
    heads: int = 2
    dropout: float = 0.1

    @property
    def hidden(self) -> int:
        """Hidden units of the feed-forward network. For dim 256 this is 8/3 dim = 683, rounded up to 768."""
        return 3 * self.dim


def make_decoder(vocabulary: int, size: Size, kernel: tuple[int, int] | None, device: torch.device) -> Decoder:
    """Return a new model.

    Weights start as normal values of variance 1 / inputs, cut at three standard deviations. Convolutions start as the
    identity. From one seed multi-token attention and plain attention therefore start as the same function.

    Args:
        vocabulary: number of different tokens.
        size: the size of the model.
        kernel: extents of the convolution in all layers; None: plain attention.
        device: the device of the model.
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
