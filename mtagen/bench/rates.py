"""Measured rates of this machine, and the lower bound of a plan's time that follows from them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ..measure.cases import Case
from ..measure.timing import time_call
from ..planner import Plan

_SIDES = {"cuda": (4096, 8192, 16384), "cpu": (1024, 2048)}  # sides of square matrices
_COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes of a copy


class Rates(NamedTuple):
    """Measured TFLOP/s of matrix products (bf16 on a GPU, fp32 on the CPU) and GB/s of a copy, reads and writes."""

    tensor_tflops: float
    dram_gbps: float


def measure_rates(device: torch.device) -> Rates:
    """Measure the best rate of a few square matrix products, and the rate of a large copy."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tflops = []
    for side in _SIDES[device.type]:
        a, b = torch.randn(2, side, side, device=device, dtype=dtype)
        out = torch.empty_like(a)
        product = time_call(partial(torch.mm, a, b, out=out), device)
        tflops.append(2 * side**3 / product.median / 1e9)
    source = torch.ones(_COPIED[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = time_call(partial(target.copy_, source), device)
    return Rates(max(tflops), 2 * source.nbytes / copy.median / 1e6)


def useful_flop(case: Case) -> int:
    """Return the flop of a training pass of plain attention, 2 per multiply-add; a contender's
    extra work is not counted.

    Forward computes scores and outputs; backward computes the scores again, and the gradients of q,
    k, v and the probabilities.
    """
    d, dv = case.spec.head_dim, case.spec.value_head_dim
    per_score = {"forward": 2 * (d + dv), "backward": 2 * (3 * d + 2 * dv)}
    return case.visible_scores * sum(per_score[name] for name in case.pass_name.split("+"))


def roofline_ms(case: Case, plan: Plan, rates: Rates) -> float:
    """Return the roofline's time: the plan's flop or the case's bytes at the measured rate,
    whichever takes longer.

    Every input is read once and every output written once. Decode is bounded by its bytes.
    """
    forward = case.row_bytes + case.cache_bytes  # q and out; k and v
    moved_by = {"forward": forward, "backward": 2 * forward, "decode": forward}  # backward: the same and its gradients
    flop_by = {**plan.flops_per_score(), "decode": 0}
    passes = case.pass_name.split("+")
    moved, flop = sum(moved_by[name] for name in passes), case.visible_scores * sum(flop_by[name] for name in passes)
    return max(flop / rates.tensor_tflops / 1e9, moved / rates.dram_gbps / 1e6)
