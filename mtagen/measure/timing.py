"""Time and memory of one call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

BUDGET_MS = 40.0
MIN_REPEATS, MAX_REPEATS = 2, 100
_BURST = 20  # calls issued at once, few enough not to fill the queue of launches
_WATCHED_S = 0.1


class Timing(NamedTuple):
    """Median and 20 % and 80 % quantiles in milliseconds, over so many repetitions."""

    median: float
    low: float
    high: float
    repeats: int


def time_call(
    call: Callable[[], object], device: torch.device, budget_ms: float = BUDGET_MS, *, warmed: bool = False
) -> Timing:
    """How long ``call`` takes, warmed up; on a GPU by events, with nothing of its inputs left in the L2 cache.

    Args:
        call: launches its work on the current stream of ``device``.
        device: a GPU or the CPU, whose caches are left as they are.
        budget_ms: for all repetitions together, of which 2 to 100 are made.
        warmed: the caller has made the call that is not timed.
    """
    if not warmed:
        call()
    times = _times(call, MIN_REPEATS, device)
    affordable = min(int(budget_ms / statistics.median(times)), MAX_REPEATS)
    times += _times(call, max(0, affordable - MIN_REPEATS), device)
    low, _, _, high = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(statistics.median(times), low, high, len(times))


def _times(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each repetition."""
    if device.type == "cpu":
        marks = [perf_counter()]
        for _ in range(repeats):
            call()
            marks.append(perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(marks)]
    flush = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    event = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def issuing_us(call: Callable[[], object], device: torch.device) -> list[float]:
    """Microseconds in which the CPU issues one ``call``, which is warmed up: of each burst to an idle GPU in 0.1 s."""
    bursts = []
    end = perf_counter() + _WATCHED_S
    while perf_counter() < end:
        torch.cuda.synchronize(device)
        start = perf_counter()
        for _ in range(_BURST):
            call()
        bursts.append(1e6 * (perf_counter() - start) / _BURST)
    torch.cuda.synchronize(device)
    return bursts


def graph_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of ``call``, which is warmed up, replayed from a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_call(graph.replay, device).median


def peak_mib(call: Callable[[], Tensor | Iterable[Tensor]], device: torch.device) -> float:
    """MiB of GPU memory that ``call`` needs at most, beyond what is there before it and what it returns."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    kept = sum(x.nbytes for x in ([results] if isinstance(results, Tensor) else results))
    return (torch.cuda.max_memory_allocated(device) - base - kept) / 2**20
