"""The stages of a pipeline as strips compute them: convolutions, mixings, bundles of heads,
planes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...spec import MAX_MIXED_HEADS, Spec
from ..geometry.mask import Mask
from ..geometry.score import GRADIENT, ScoreStage

SCORE_SCALE = 2.0**-6  # factor of scores in planes, with which fp16 reaches 4 million
PROBABILITY_SCALE = 2.0**8  # factor of probabilities in planes, with which fp16 keeps 11 bits down to 2e-7
_ALIGNED = 8  # keys in 16 bytes of the narrowest elements
_DOT = 16  # least number of rows, columns and terms of a product on tensor cores


@dataclass(frozen=True)
class Convolution:
    """One convolution.

    Attributes:
        name: name of its kernels.
        weight: name of its weight.
        title: description, for comments.
        cq, ck: extents.
        pad_left, pad_right: keys before and after its own that a result reads.
        final: whether it follows the softmax. Its results are multiplied by values, maybe after
            mixing, so hidden results must be zeros.
        scale: factor of the scores or probabilities in the convolved plane.
        factor: factor of the results.
        reach: number of rows after its own that may count a score that its own row does not see.
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
    reach: int

    @property
    def roles(self) -> tuple[str, str]:
        """Roles of the kernels that read the convolved plane."""
        return self.name, f"{self.name}_gradient"

    @property
    def gradient_roles(self) -> tuple[str, str]:
        """Roles of the kernels that read the gradient of the results."""
        return f"{self.name}_adjoint", f"{self.name}_gradient"

    @property
    def aligned_left(self) -> int:
        """Keys before a tile of results at which its window starts: pad_left, rounded up to 16
        bytes for loads.
        """
        return _aligned(self.pad_left)

    @property
    def aligned_right(self) -> int:
        """Keys before a tile at which the window of the adjoint starts: pad_right, rounded up."""
        return _aligned(self.pad_right)

    def left_of(self, key: str) -> str:
        """Return source for the first key of the window of a tile of results from ``key`` on."""
        return f"{key} - {self.aligned_left}" if self.aligned_left else key

    def right_of(self, key: str) -> str:
        """Return source for the first key of the window of a tile of the adjoint from ``key`` on."""
        return f"{key} - {self.aligned_right}" if self.aligned_right else key

    def window(self, keys: int) -> int:
        """Return the number of keys that a tile of ``keys`` results reads, padded to a power of
        two.
        """
        spare = max(self.aligned_left - self.pad_left, self.aligned_right - self.pad_right)
        return max(_DOT, 1 << (keys + self.ck - 2 + spare).bit_length())


@dataclass(frozen=True)
class Mixture:
    """One mixing of heads.

    Attributes:
        weight: name of its matrices.
        heads: number of heads of a group.
    """

    weight: str
    heads: int

    @property
    def pointer(self) -> str:
        """Name of the matrices' pointer in kernels."""
        return f"{self.weight}_ptr"


@dataclass(frozen=True)
class TokenMixture:
    """One mixing of heads whose matrices depend on tokens. It has kernels of its own.

    A query's matrix and the weight's are added up before; kernels read their sum, and the keys' factors.

    Attributes:
        role: role of its kernel of forward passes.
        weight: name of its matrices.
        query_factors, key_factors: names of the factors.
        heads: number of heads of a group.
        rank: rank of a key's matrix; 0 if keys have none.
        query_rank: rank of a query's matrix; 0 if queries have none.
        final: whether it follows the softmax. Its results are multiplied by values, so hidden results must be zeros.
        scale: factor of the scores or probabilities in the plane that it mixes.
        factor: factor of the results.
    """

    role: str
    weight: str
    query_factors: str
    key_factors: str
    heads: int
    rank: int
    query_rank: int
    final: bool
    scale: float
    factor: float

    @property
    def width(self) -> int:
        """Number of factors that a key has for each head."""
        return 2 * self.rank + 1 if self.rank else 0

    @property
    def query_width(self) -> int:
        """Number of factors that a query has for each head."""
        return 2 * self.query_rank + 1 if self.query_rank else 0

    @property
    def partial(self) -> str:
        """The host's name of the partial sums of the gradient of the weight."""
        return f"{self.role}_partial"

    @property
    def matrices(self) -> str:
        """The host's name of the matrices of queries."""
        return "post_matrices" if self.final else "matrices"

    @property
    def adjoints(self) -> str:
        """The host's name of the same matrices in the dtype of gradients."""
        return "post_adjoints" if self.final else "adjoints"

    @property
    def values(self) -> Mapping[str, str]:
        """The host's names of the tensors that kernels of forward passes read, by the names of kernels' arguments."""
        return {"matrices": self.matrices} | ({"key_factors": self.key_factors} if self.rank else {})

    @property
    def key_partial(self) -> str:
        """The host's name of the sums of the gradients of keys' factors over chunks of rows."""
        return f"{self.role}_key_partial"

    @property
    def chunks(self) -> str:
        """The host's name of the number of chunks of rows over which programs sum gradients of keys' factors."""
        return f"{self.role}_chunks"

    @property
    def gradient_values(self) -> Mapping[str, str]:
        """The host's names of the tensors of kernels of gradients, and of the sums that they add to."""
        keys = {"key_factors": self.key_factors, "key_partial": self.key_partial, "all_chunks": self.chunks}
        matrices = {"matrices": self.matrices} if self.final else {}
        return {"adjoints": self.adjoints, **matrices, **(keys if self.rank else {})}


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
        scale = PROBABILITY_SCALE if final else SCORE_SCALE
        factor = 1.0 if self.post_mix or not final else 1 / scale  # a mixing divides by the scale itself
        title, padding = f"The convolution {when}", self.spec.padding(ck)
        reach = cq - 1 if Mask.of(self.spec).zeroes_terms else 0
        return Convolution(name, weight, title, cq, ck, *padding, final, scale, factor, reach)

    @property
    def convolution(self) -> Convolution | None:
        """The convolution before the softmax, or None."""
        return self._convolution("convolution", "weight", "before the softmax")

    @property
    def post_convolution(self) -> Convolution | None:
        """The convolution after the softmax, or None."""
        return self._convolution("post_convolution", "post_weight", "after the softmax")

    @property
    def reach(self) -> int:
        """Number of rows after its own that may need a hidden score: see ``Convolution.reach``."""
        return self.convolution.reach if self.convolution else 0

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """All convolutions of the pipeline, in order."""
        return tuple(stage for stage in (self.convolution, self.post_convolution) if stage)

    @property
    def mix(self) -> Mixture | None:
        """The mixing before the softmax that the softmax's kernels compute, or None."""
        if self.token_mix is not None:
            return None
        return Mixture("head_weight", self.spec.mixed_heads) if self.spec.mixed_heads else None

    @property
    def token_mix(self) -> TokenMixture | None:
        """The mixing before the softmax, if its matrices depend on tokens."""
        if self.spec.dynamic_ranks is None or self.spec.mixed_heads is None:
            return None
        rank_q, rank_k = self.spec.dynamic_ranks
        names, heads = ("head_weight", "query_factors", "key_factors"), self.spec.mixed_heads
        return TokenMixture("mix", *names, heads, rank_k, rank_q, False, SCORE_SCALE, 1.0)

    @property
    def token_post_mix(self) -> TokenMixture | None:
        """The mixing after the softmax, if its matrices depend on tokens."""
        if self.spec.post_dynamic_ranks is None or self.spec.post_mixed_heads is None:
            return None
        rank_q, rank_k = self.spec.post_dynamic_ranks
        names, heads = ("post_head_weight", "post_query_factors", "post_key_factors"), self.spec.post_mixed_heads
        scales = PROBABILITY_SCALE, 1 / PROBABILITY_SCALE
        return TokenMixture("post_mix", *names, heads, rank_k, rank_q, True, *scales)

    @property
    def token_mixes(self) -> tuple[TokenMixture, ...]:
        """The mixings whose matrices depend on tokens, in order."""
        return tuple(stage for stage in (self.token_mix, self.token_post_mix) if stage)

    @property
    def post_mix(self) -> Mixture | None:
        """The mixing after the softmax, or None."""
        return Mixture("post_head_weight", self.spec.post_mixed_heads) if self.spec.post_mixed_heads else None

    @property
    def post_is_separate(self) -> bool:
        """Whether probabilities are stored, for a convolution, or for a mixing that depends on tokens or does not fit
        mix's bundles.
        """
        stored = self.post_convolution is not None or self.token_post_mix is not None
        return stored or (self.post_mix is not None and self.closed_heads > MAX_MIXED_HEADS)

    @property
    def separate_post_mix(self) -> bool:
        """Whether the mixing after the softmax has its own kernel."""
        return self.post_mix is not None and self.post_is_separate

    @property
    def masks_probability_gradients(self) -> bool:
        """Whether hidden gradients of probabilities must be zeros, because a convolution reads
        them.
        """
        return self.post_convolution is not None and self.post_mix is None

    @property
    def has_gradient_product(self) -> bool:
        """Whether the gradient of probabilities needs a kernel: cuBLAS can neither mask it nor
        respect documents.
        """
        return self.masks_probability_gradients or self.spec.packed

    @property
    def dropping(self) -> tuple[str, ...]:
        """Roles of the kernels that apply dropout.

        They are the last kernel that writes probabilities and the first one that has their
        gradients. In the backward pass, the kernel of the mixing or of the softmax is both.
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
        """Whether a mixing after the softmax is the only stage, except maybe a convolution before
        the softmax.

        Then outputs may be mixed instead of probabilities (:mod:`.concatenation`). Dropout follows
        the mixing, so with dropout the probabilities themselves must be mixed.
        """
        alone = self.post_mix is not None and self.mix is None and self.post_convolution is None
        return alone and not (self.spec.dropout or self.token_mixes)

    @property
    def normalizes_again(self) -> bool:
        """Whether the backward pass normalises its probabilities again.

        The forward pass may be a fused kernel, which rounds scores differently, so that rows would
        not sum to 1.
        """
        return self.mixes_after_alone or self.spec.is_liftable

    @property
    def fused_post_mix(self) -> bool:
        """Whether the softmax's kernel also mixes the heads after the softmax."""
        return self.post_mix is not None and not self.post_is_separate

    @property
    def closed_heads(self) -> int:
        """The smallest number of consecutive heads that mix only with each other, before and after
        the softmax.
        """
        return math.lcm(self.mix.heads if self.mix else 1, self.spec.post_mixed_heads or 1)

    @property
    def heads(self) -> int:
        """Number of heads of a bundle, which one program of the softmax takes."""
        return _bundle(self.closed_heads if self.fused_post_mix else self.mix.heads if self.mix else 1)

    @property
    def post_heads(self) -> int:
        """Number of heads of a bundle in the kernels of a separate mixing after the softmax."""
        return _bundle(self.spec.post_mixed_heads or 1) if self.separate_post_mix else self.heads

    @property
    def has_score_slopes(self) -> bool:
        """Whether gradients of what the first convolution takes are multiplied by the slope of a function of scores."""
        return bool(ScoreStage.of(self.spec, "scores").modify_backward != GRADIENT)

    @property
    def has_scores_backward(self) -> bool:
        """Whether a kernel reads gradients of what the first convolution takes, for that slope or for gradients of
        parameters.
        """
        return self.has_score_slopes or bool(ScoreStage.of(self.spec, "scores").sums)

    @property
    def places_keys(self) -> bool:
        """Whether the functions of scores in kernels of rows depend on places in the sequence, where planes
        begin with a later key.
        """
        return self._places_keys("convolved", "logits")

    @property
    def products_place_keys(self) -> bool:
        """Whether the function of scores before the convolution does."""
        return self._places_keys("scores")

    def _places_keys(self, *places: str) -> bool:
        counts = (ScoreStage.of(self.spec, place).counts_keys for place in places)
        return Mask.of(self.spec).hides_earlier and any(counts)

    @property
    def post_context(self) -> int:
        """Number of earlier rows that the convolution after the softmax reads."""
        return self.post_convolution.cq - 1 if self.post_convolution else 0

    @property
    def first_valid(self) -> int:
        """First row of a decode step whose scores have their whole context.

        Earlier rows are not needed.
        """
        return self.spec.context - self.post_context

    @property
    def forward_planes(self) -> tuple[str, ...]:
        """Names of the planes of a strip in the forward pass."""
        convolved = ("convolved",) if self.convolution else ()
        return ("scores", *convolved, *(("convolved_shares",) if self.post_convolution else ()))

    @property
    def backward_planes(self) -> tuple[str, ...]:
        """Names of the planes of a strip in the backward pass."""
        convolved = (("convolved",) if self.convolution else ()) + (("mixed",) if self.token_mix else ())
        if not self.post_is_separate:
            return ("scores", *convolved, "grad_shares", "shares")
        return ("scores", *convolved, "grad_shares", "probabilities", *(("shares",) if self.post_convolution else ()))

    @property
    def matrix_partials(self) -> Mapping[str, int]:
        """Names of the partial sums of matrices' gradients, each with the heads of its bundles."""
        partials = {"mix_partial": self.heads} if self.mix else {}
        partials |= {"post_mix_partial": self.post_heads} if self.post_mix else {}
        return partials | {stage.partial: stage.heads for stage in self.token_mixes}


def _aligned(keys: int) -> int:
    return -(-keys // _ALIGNED) * _ALIGNED


def block_of(heads: int) -> int:
    """Return the heads of a bundle, padded as on chip."""
    return max(_DOT, 1 << (heads - 1).bit_length())


def _bundle(closed: int) -> int:
    """Return the heads of a bundle: whole groups, enough to fill a product."""
    return closed * max(1, _DOT // closed)
