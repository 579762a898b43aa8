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
MIN_REPEATS, MAX_REPEATS = 3, 100  # the first one may allocate memory, and three have a median without it
_BURST = 20  # calls issued at once, too few to fill the queue of launches
_WATCHED_S = 0.1


class Timing(NamedTuple):
    """Median and 20 % and 80 % quantiles in milliseconds, over ``repeats`` calls."""

    median: float
    low: float
    high: float
    repeats: int


def time_call(
    call: Callable[[], object], device: torch.device, budget_ms: float = BUDGET_MS, *, warmed: bool = False
) -> Timing:
    """Measure the time of ``call`` after a warm-up; on a GPU with events, and with an L2 cache
    without its inputs.

    Args:
        call: launches its work on the current stream of ``device``.
        device: a GPU, or the CPU, whose caches are not flushed.
        budget_ms: time for all repetitions together; there are 3 to 100.
        warmed: whether the caller has already made the untimed first call.
    """
    if not warmed:
        call()
    times = _times(call, MIN_REPEATS, device)
    affordable = min(int(budget_ms / statistics.median(times)), MAX_REPEATS)
    times += _times(call, max(0, affordable - MIN_REPEATS), device)
    low, _, _, high = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(statistics.median(times), low, high, len(times))


def _times(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each repetition."""
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


def issuing_us(
    call: Callable[[], object], device: torch.device, *, burst: int = _BURST, seconds: float = _WATCHED_S
) -> list[float]:
    """Measure the CPU's microseconds per issued ``call``, for each burst of calls to an idle GPU.

    Args:
        call: what is measured. The caller has warmed it up.
        device: the GPU.
        burst: calls of a burst.
        seconds: the time in which bursts begin.
    """
    bursts = []
    end = perf_counter() + seconds
    while perf_counter() < end:
        torch.cuda.synchronize(device)
        start = perf_counter()
        for _ in range(burst):
            call()
        bursts.append(1e6 * (perf_counter() - start) / burst)
    torch.cuda.synchronize(device)
    return bursts


def graph_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the median milliseconds of a warmed-up ``call``, replayed from a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_call(graph.replay, device).median


def peak_mib(call: Callable[[], Tensor | Iterable[Tensor]], device: torch.device) -> float:
    """Return the peak GPU memory of ``call`` in MiB, without memory allocated before it and without
    its results.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    returned = sum(x.nbytes for x in ([results] if isinstance(results, Tensor) else results))
    return (torch.cuda.max_memory_allocated(device) - base - returned) / 2**20
