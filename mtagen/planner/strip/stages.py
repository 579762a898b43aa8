"""What the kernels of a pipeline are made for: its convolutions, its mixtures, and what becomes of heads and planes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...spec import MAX_MIXED_HEADS, Spec

SCORE_SCALE = 2.0**-6  # what planes hold of a scaled score: fp16 reaches 4 million
SHARE_SCALE = 2.0**8  # and of a probability: fp16 keeps 11 bits down to 2e-7
_ALIGNED = 8  # keys: 16 bytes of the narrowest elements
_DOT = 16  # rows, columns and terms of a product on tensor cores, at least


@dataclass(frozen=True)
class Convolution:
    """One convolution.

    Attributes:
        name: of its kernels.
        weight: name of its weight.
        title: what it is, for comments.
        cq, ck: extents.
        pad_left, pad_right: keys before and after its own that a result reads.
        final: whether its results are multiplied with values, or mixed before: hidden ones must be zeros.
        scale: of what it convolves: planes hold scores, or probabilities, times this.
        factor: what its results are multiplied by.
    """

    name: str
    weight: str
    title: str
    cq: int
    ck: int
    pad_left: int
    pad_right: int
    final: bool
    scale: float
    factor: float

    @property
    def lead_left(self) -> int:
        """Keys before a tile of results from which its window starts: whole 16 bytes, as loads of tiles ask."""
        return _aligned(self.pad_left)

    @property
    def lead_right(self) -> int:
        """The same of the adjoint, which reads keys the other way round."""
        return _aligned(self.pad_right)

    def left_of(self, key: str) -> str:
        """Source of the first key of the window of a tile of results from ``key`` on."""
        return f"{key} - {self.lead_left}" if self.lead_left else key

    def right_of(self, key: str) -> str:
        """The same of the adjoint."""
        return f"{key} - {self.lead_right}" if self.lead_right else key

    def window(self, keys: int) -> int:
        """Keys that a tile of so many results reads, padded to a power of two."""
        spare = max(self.lead_left - self.pad_left, self.lead_right - self.pad_right)
        return max(_DOT, 1 << (keys + self.ck - 2 + spare).bit_length())


@dataclass(frozen=True)
class Mixture:
    """One mixture of heads.

    Attributes:
        weight: name of its matrices.
        heads: of a group.
    """

    weight: str
    heads: int

    @property
    def pointer(self) -> str:
        """The matrices in kernels."""
        return f"{self.weight}_ptr"


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline as its kernels take them.

    Attributes:
        spec: the request.
    """

    spec: Spec

    def _convolution(self, name: str, weight: str, when: str) -> Convolution | None:
        if weight not in self.spec.kernels:
            return None
        (cq, ck), final = self.spec.kernels[weight], name != "convolution"
        scale = SHARE_SCALE if final else SCORE_SCALE
        factor = 1.0 if self.post_mix or not final else 1 / scale  # mixing, too, divides by it
        title, padding = f"The convolution {when}", self.spec.padding(ck)
        return Convolution(name, weight, title, cq, ck, *padding, final, scale, factor)

    @property
    def convolution(self) -> Convolution | None:
        """The one before the softmax."""
        return self._convolution("convolution", "weight", "before the softmax")

    @property
    def post_convolution(self) -> Convolution | None:
        """The one after it."""
        return self._convolution("post_convolution", "post_weight", "after the softmax")

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Both, of those there are."""
        return tuple(one for one in (self.convolution, self.post_convolution) if one)

    @property
    def mix(self) -> Mixture | None:
        """The mixture before the softmax."""
        return Mixture("head_weight", self.spec.mixed_heads) if self.spec.mixed_heads else None

    @property
    def post_mix(self) -> Mixture | None:
        """The mixture after it."""
        return Mixture("post_head_weight", self.spec.post_mixed_heads) if self.spec.post_mixed_heads else None

    @property
    def post_is_separate(self) -> bool:
        """Whether probabilities are stored: a convolution follows, or a mixture that shares no bundle with mix."""
        return self.post_convolution is not None or (self.post_mix is not None and self._closed > MAX_MIXED_HEADS)

    @property
    def separate_post_mix(self) -> bool:
        """Whether the mixture after the softmax is a kernel of its own."""
        return self.post_mix is not None and self.post_is_separate

    @property
    def masks_grad_shares(self) -> bool:
        """Whether hidden gradients of shares must be zeros. A mixture, and the softmax, look at what rows see only."""
        return self.post_convolution is not None and self.post_mix is None

    @property
    def owns_grad_shares(self) -> bool:
        """Whether there is always a kernel for gradients of shares: a product of whole matrices knows no documents."""
        return self.masks_grad_shares or self.spec.packed

    @property
    def dropping(self) -> tuple[str, ...]:
        """Roles of the kernels that drop: the last one that writes shares, and the first one that has their gradients.

        Of the backward pass, the kernel that mixes, or takes the softmax, does both.
        """
        if not self.spec.dropout:
            return ()
        if self.separate_post_mix:
            return "post_mix", "post_mix_backward"
        if self.post_convolution:
            return "post_convolution", "grad_shares"
        return "softmax", "softmax_backward"

    @property
    def mixes_after_alone(self) -> bool:
        """Whether heads are mixed after the softmax and nothing else is done around it but a convolution before.

        Then outputs may be mixed instead of shares (:mod:`.concatenation`). Dropout follows the mixture: shares must be
        mixed then.
        """
        alone = self.post_mix is not None and self.mix is None and self.post_convolution is None
        return alone and not self.spec.dropout

    @property
    def normalizes_again(self) -> bool:
        """Whether the backward pass sums its probabilities, which it must not take for 1 in sum.

        The forward pass may be a fused kernel, which rounds scores otherwise.
        """
        return self.mixes_after_alone or self.spec.convolves_only

    @property
    def fused_post_mix(self) -> bool:
        """Whether the softmax's kernel mixes the heads after it."""
        return self.post_mix is not None and not self.post_is_separate

    @property
    def _closed(self) -> int:
        """The fewest heads that mix with each other only, before the softmax and after it."""
        return math.lcm(self.spec.mixed_heads or 1, self.spec.post_mixed_heads or 1)

    @property
    def heads(self) -> int:
        """Heads of a bundle, which one program of the softmax takes."""
        return _bundle(self._closed if self.fused_post_mix else self.spec.mixed_heads or 1)

    @property
    def post_heads(self) -> int:
        """Heads of a bundle of a mixture after the softmax that has kernels of its own."""
        return _bundle(self.spec.post_mixed_heads or 1) if self.separate_post_mix else self.heads

    @property
    def post_context(self) -> int:
        """Rows before its own that the convolution after the softmax reads."""
        return self.post_convolution.cq - 1 if self.post_convolution else 0

    @property
    def first_valid(self) -> int:
        """The first row of a decode step whose scores have all of their context. None before is needed."""
        return self.spec.context - self.post_context

    @property
    def forward_planes(self) -> tuple[str, ...]:
        """The planes of a strip."""
        convolved = ("convolved",) if self.convolution else ()
        return ("scores", *convolved, *(("convolved_shares",) if self.post_convolution else ()))

    @property
    def backward_planes(self) -> tuple[str, ...]:
        """Those of the backward pass."""
        convolved = ("convolved",) if self.convolution else ()
        if not self.post_is_separate:
            return ("scores", *convolved, "grad_shares", "shares")
        return ("scores", *convolved, "grad_shares", "probabilities", *(("shares",) if self.post_convolution else ()))

    @property
    def matrix_partials(self) -> Mapping[str, int]:
        """Partial sums of gradients of matrices, each with the heads of its bundles."""
        found = {"mix_partial": self.heads} if self.mix else {}
        return found | ({"post_mix_partial": self.post_heads} if self.post_mix else {})


def _aligned(keys: int) -> int:
    return -(-keys // _ALIGNED) * _ALIGNED


def block_of(heads: int) -> int:
    """Heads of a bundle on chip."""
    return max(_DOT, 1 << (heads - 1).bit_length())


def _bundle(closed: int) -> int:
    """Heads of a bundle: whole groups, and as many as a product takes anyway."""
    return closed * max(1, _DOT // closed)
