"""What a training step of attention over several ranks takes: a model of its time, its traffic and its memory.

It counts what :class:`ContextParallel` does, and divides by rates that were measured on one rank and on its link. It
knows nothing of other programs, of clocks that fall under load, or of small problems that fill no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..measure.cases import seen_pairs
from ..spec import Spec
from .sharding import Call, Rows, Sharding, common, fresh, regions


@dataclass(frozen=True)
class Rates:
    """What one rank does in a second.

    Attributes:
        forward: scores of the op's forward pass: heads times pairs of a row and a key that it sees.
        backward: of its backward pass.
        link: bytes that reach a rank from the others, while as many leave it.
        latency: seconds of a transfer that carries nothing.
    """

    forward: float
    backward: float
    link: float
    latency: float = 2e-5


@dataclass(frozen=True)
class Prediction:
    """One call and its backward pass.

    Attributes:
        forward_s: seconds until the last rank has its outputs.
        backward_s: seconds until the last rank has its gradients.
        alone_s: seconds of both passes on one rank with the whole sequence.
        traffic: bytes that the busiest rank receives in both passes, or sends if those are more.
        gathered: bytes of keys and values that the rank with the most of them holds; in the backward pass it holds the
            gradients of those of each call besides.
    """

    forward_s: float
    backward_s: float
    alone_s: float
    traffic: int
    gathered: int

    @property
    def speedup(self) -> float:
        """How much faster it is than one rank."""
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
    """The time, traffic and memory of one call of :class:`ContextParallel` and its backward pass.

    Keys and values of a pass begin to travel with it, one chunk's after the other's; a rank computes a chunk as soon as
    what the chunk needs is there. Gradients travel together once all ranks have computed them.

    Args:
        spec: of the op.
        rates: of one rank.
        length: N, rows of a sequence.
        ranks: W.
        heads: H, of queries.
        kv_heads: Hkv, of keys and values.
        batch: sequences.
        balanced: as of :class:`ContextParallel`.
    """
    held = Sharding(length, ranks, balanced).held
    by_rank = [[Call.of(chunk, length, spec) for chunk in chunks] for chunks in held]
    steps = list(zip(*by_rank, strict=True))
    query_bytes = batch * heads * spec.head_dim * spec.itemsize
    pair_bytes = batch * kv_heads * (spec.head_dim + spec.value_head_dim) * spec.itemsize

    def moved(queries: Sequence[Rows], keys: Sequence[Rows]) -> list[list[int]]:
        """Bytes that each rank receives and sends in a step."""
        kinds = (query_bytes, _moved(held, queries)), (pair_bytes, _moved(held, keys))
        return _sums([[[size * rows for rows in ways] for ways in each] for size, each in kinds])

    new = list(zip(*map(fresh, by_rank), strict=True))
    contexts = [[call.context for call in calls] for calls in steps]
    first = [moved(queries, keys) for queries, keys in zip(contexts, new, strict=True)]
    second = [moved(ranks * [Rows(0, 0)], keys) for keys in new]  # queries are kept from pass to pass
    # Gradients go where rows came from, those of all steps together, and of a key as many as calls took it.
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
    whole = batch * heads * seen_pairs(length, length, spec.left, spec.right)
    return Prediction(
        forward_s=max(forward),
        backward_s=max(backward) + _carried(returned, rates),
        alone_s=whole / rates.forward + whole / rates.backward,
        traffic=max(map(max, everything)),
        gathered=pair_bytes * max(sum(region.count for region in set(regions(calls))) for calls in by_rank),
    )


def _sums(steps: Sequence[list[list[int]]]) -> list[list[int]]:
    """Of all steps."""
    return [[sum(way) for way in zip(*each, strict=True)] for each in zip(*steps, strict=True)]


def _moved(held: Sequence[Sequence[Rows]], needed: Sequence[Rows]) -> list[list[int]]:
    """The rows that each rank receives from others, and that it sends to them."""
    shared = [[sum(common(chunk, rows).count for chunk in chunks) for chunks in held] for rows in needed]
    received = [sum(each) - each[rank] for rank, each in enumerate(shared)]
    sent = [sum(each) - each[rank] for rank, each in enumerate(zip(*shared, strict=True))]
    return [list(each) for each in zip(received, sent, strict=True)]


def _carried(moved: Sequence[Sequence[int]], rates: Rates) -> float:
    """Seconds of a transfer in which each rank receives and sends so many bytes."""
    most = max(max(rank) for rank in moved)
    return rates.latency + most / rates.link if most else 0.0


def _scores(call: Call, spec: Spec) -> int:
    """Pairs of a row and a key that it sees, of the rows that a call computes."""
    return seen_pairs(call.queries.count, call.keys.count, spec.left, spec.right)


def _computed(transfers: Sequence[float], seconds: Sequence[Sequence[float]]) -> list[float]:
    """When each rank has computed all steps."""
    ends = [0.0] * len(seconds[0])
    for arrived, each in zip(accumulate(transfers), seconds, strict=True):
        ends = [max(end, arrived) + more for end, more in zip(ends, each, strict=True)]
    return ends
