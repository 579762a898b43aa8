"""Calls of an op as backends take them, from the tensors of tests."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mtagen.call import NO_LEARNED, Call, Documents, Step
from mtagen.dropout import Dropout
from mtagen.spec import WEIGHTS, Spec


def call_of(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    documents: Documents | None = None,
    dropout: Dropout | None = None,
) -> Call:
    """A call with the weights of the spec's stages."""
    call = Call(q, k, v, *_slots(spec, weights), scale, "")
    call = call if documents is None else call._replace(**documents._asdict())
    return call if dropout is None else call._replace(dropout_seed=dropout.seed, dropout_p=dropout.p)


def step_of(
    spec: Spec,
    q_tail: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weights: Sequence[Tensor],
    scale: float,
    cache_seqlens: Tensor | None = None,
    num_splits: int = 0,
) -> Step:
    """A step of decoding with the weights of the spec's stages."""
    return Step(q_tail, k_cache, v_cache, *_slots(spec, weights), cache_seqlens, scale, num_splits, "")


def _slots(spec: Spec, weights: Sequence[Tensor]) -> list[Tensor | None]:
    given = dict(zip(spec.weight_names, weights, strict=True))
    return [*(given.get(name) for name in WEIGHTS), *NO_LEARNED]
