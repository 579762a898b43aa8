"""Model of the time, traffic and memory of a training step of attention over several ranks.

The model counts the work of :class:`ContextParallel` and divides by rates that were measured on one
rank and on its link. It ignores other programs, clocks that fall under load, and problems too small
to fill a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..measure.cases import visible_pairs
from ..spec import Spec
from .sharding import ChunkCall, Rows, Sharding, common, fresh, regions


@dataclass(frozen=True)
class Rates:
    """Rates of one rank, per second.

    Attributes:
        forward: scores in the op's forward pass: heads times pairs of a row and a key that the row
            sees.
        backward: scores in its backward pass.
        link: bytes that a rank receives from the others while it sends as many.
        latency: seconds of an empty transfer.
    """

    forward: float
    backward: float
    link: float
    latency: float = 2e-5


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of one call and its backward pass.

    Attributes:
        forward_s: seconds until the last rank has its outputs.
        backward_s: seconds until the last rank has its gradients.
        alone_s: seconds of both passes on one rank with the whole sequence.
        traffic: bytes that the busiest rank receives in both passes, or sends if it sends more.
        gathered: bytes of keys and values on the rank that holds most of them; in the backward pass
            it also holds the gradients of the keys and values of each call.
    """

    forward_s: float
    backward_s: float
    alone_s: float
    traffic: int
    gathered: int

    @property
    def speedup(self) -> float:
        """Time on one rank over the time on all ranks."""
        return self.alone_s / (self.forward_s + self.backward_s)


def predict(
    spec: Spec,
    rates: Rates,
    *,
    length: int,
    ranks: int,
    heads: int,
    kv_heads: int,
    batch: int = 1,
    balanced: bool = True,
) -> Prediction:
    """Predict the time, traffic and memory of one call of :class:`ContextParallel` and its backward
    pass.

    Keys and values begin to travel when a pass begins, for one chunk after the other; a rank
    computes a chunk as soon as the chunk's rows have arrived. Gradients travel together once all
    ranks have computed them.

    Args:
        spec: the op's spec.
        rates: rates of one rank.
        length: N, rows of a sequence.
        ranks: W.
        heads: H, heads of queries.
        kv_heads: Hkv, heads of keys and values.
        batch: number of sequences.
        balanced: see :class:`ContextParallel`.
    """
    held = Sharding(length, ranks, balanced).held
    by_rank = [[ChunkCall.of(chunk, length, spec) for chunk in chunks] for chunks in held]
    steps = list(zip(*by_rank, strict=True))
    query_bytes = batch * heads * spec.head_dim * spec.itemsize
    pair_bytes = batch * kv_heads * (spec.head_dim + spec.value_head_dim) * spec.itemsize

    def moved(queries: Sequence[Rows], keys: Sequence[Rows]) -> list[list[int]]:
        """Return the bytes that each rank receives and sends in a step."""
        kinds = (query_bytes, _moved(held, queries)), (pair_bytes, _moved(held, keys))
        return _sums([[[size * rows for rows in ways] for ways in each] for size, each in kinds])

    new = list(zip(*map(fresh, by_rank), strict=True))
    contexts = [[call.context for call in calls] for calls in steps]
    first = [moved(queries, keys) for queries, keys in zip(contexts, new, strict=True)]
    second = [moved(ranks * [Rows(0, 0)], keys) for keys in new]  # queries are kept from pass to pass
    # Gradients of all steps travel together, back to the rows' ranks. A key has one gradient from each call with it.
    returned = _sums(
        [moved(queries, [call.keys for call in calls]) for queries, calls in zip(contexts, steps, strict=True)]
    )
    scores = [[batch * heads * _scores(call, spec) for call in calls] for calls in steps]
    forward = _computed(
        [_carried(each, rates) for each in first], [[count / rates.forward for count in each] for each in scores]
    )
    backward = _computed(
        [_carried(each, rates) for each in second], [[count / rates.backward for count in each] for each in scores]
    )
    everything = _sums([*first, *second, [[received, sent] for sent, received in returned]])
    whole = batch * heads * visible_pairs(length, length, spec.left, spec.right)
    return Prediction(
        forward_s=max(forward),
        backward_s=max(backward) + _carried(returned, rates),
        alone_s=whole / rates.forward + whole / rates.backward,
        traffic=max(map(max, everything)),
        gathered=pair_bytes * max(sum(region.count for region in set(regions(calls))) for calls in by_rank),
    )


def _sums(steps: Sequence[list[list[int]]]) -> list[list[int]]:
    """Add up all steps."""
    return [[sum(way) for way in zip(*each, strict=True)] for each in zip(*steps, strict=True)]


def _moved(held: Sequence[Sequence[Rows]], needed: Sequence[Rows]) -> list[list[int]]:
    """Return the number of rows that each rank receives from others and sends to others."""
    shared = [[sum(common(chunk, rows).count for chunk in chunks) for chunks in held] for rows in needed]
    received = [sum(each) - each[rank] for rank, each in enumerate(shared)]
    sent = [sum(each) - each[rank] for rank, each in enumerate(zip(*shared, strict=True))]
    return [list(each) for each in zip(received, sent, strict=True)]


def _carried(moved: Sequence[Sequence[int]], rates: Rates) -> float:
    """Return the seconds of a transfer, given the bytes that each rank receives and sends."""
    most = max(max(rank) for rank in moved)
    return rates.latency + most / rates.link if most else 0.0


def _scores(call: ChunkCall, spec: Spec) -> int:
    """Return the number of pairs of a row of a call and a key that the row sees."""
    return visible_pairs(call.queries.count, call.keys.count, spec.left, spec.right)


def _computed(transfers: Sequence[float], seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return the time at which each rank has computed all steps."""
    ends = [0.0] * len(seconds[0])
    for arrived, each in zip(accumulate(transfers), seconds, strict=True):
        ends = [max(end, arrived) + more for end, more in zip(ends, each, strict=True)]
    return ends
