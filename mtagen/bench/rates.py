"""What this machine can do, measured, and the time below which a plan cannot get on it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ..planner import Plan
from .cases import Case
from .timing import measure

_SIDES = {"cuda": (4096, 8192, 16384), "cpu": (1024, 2048)}  # of square matrices
_COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes


class Rates(NamedTuple):
    """Measured TFLOP/s of matrix products (bf16 on a GPU, fp32 on the CPU) and GB/s of a copy, reads and writes."""

    tensor_tflops: float
    dram_gbps: float


def measure_rates(device: torch.device) -> Rates:
    """The best of a few square matrix products, and a large copy."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tflops = []
    for side in _SIDES[device.type]:
        a, b = torch.randn(2, side, side, device=device, dtype=dtype)
        out = torch.empty_like(a)
        product = measure(partial(torch.mm, a, b, out=out), device)
        tflops.append(2 * side**3 / product.median / 1e9)
    source = torch.ones(_COPIED[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = measure(partial(target.copy_, source), device)
    return Rates(max(tflops), 2 * source.nbytes / copy.median / 1e6)


def useful_flop(case: Case) -> int:
    """Flop of a training pass of plain attention, so that nobody profits from extra work: 2 per multiply-add."""
    per_score = {"forward": 4, "backward": 10, "forward+backward": 14}[case.pass_name] * case.head_dim
    return per_score * case.seen_scores


def roofline_ms(case: Case, plan: Plan, rates: Rates) -> float:
    """The larger of the plan's flop and the case's bytes, each at the measured rate.

    Every input is read once and every output written once. Decode is bounded by its bytes.
    """
    forward = 2 * case.row_bytes + case.cache_bytes  # q and out; k and v
    backward = 4 * case.row_bytes + 2 * case.cache_bytes  # q, out, both gradients; k, v and their gradients
    moved = {"backward": backward, "forward+backward": forward + backward}.get(case.pass_name, forward)
    per_score = plan.flops_per_score()
    flop = 0 if case.decodes else case.seen_scores * sum(per_score[name] for name in case.pass_name.split("+"))
    return max(flop / rates.tensor_tflops / 1e9, moved / rates.dram_gbps / 1e6)
