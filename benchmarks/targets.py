"""The CUDA backend at the sizes it was made for, against SDPA without convolution in the same run.

python benchmarks/targets.py --json benchmarks/results/h200_targets.json
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from attention import commit, environment, timings
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mtagen

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Sizes(NamedTuple):
    """One problem; H is 16, elements are bf16."""

    head_dim: int
    batch: int = 1
    n: int = 8192
    causal: bool = True


class Case(NamedTuple):
    """A kernel at some sizes, and what the build is asked for besides.

    ``limits`` are the ratios to cuDNN, forward and backward, that it is to stay under; None: none.
    """

    kernel: tuple[int, int]
    sizes: Sizes
    options: tuple[tuple[str, object], ...] = ()
    limits: tuple[float | None, float | None] = (None, None)


SM_80 = (("target", "sm_80"),)
DETERMINISTIC = (("deterministic", True),)
CASES = (
    Case((6, 11), Sizes(128), limits=(1.9, 2.6)),
    Case((6, 11), Sizes(64), limits=(2.2, 3.0)),
    Case((6, 11), Sizes(128, causal=False), limits=(2.4, None)),
    Case((6, 11), Sizes(64, causal=False), limits=(2.7, None)),
    Case((6, 11), Sizes(128, batch=4), limits=(2.3, None)),
    Case((6, 11), Sizes(128, batch=4, n=4096), limits=(None, 2.7)),
    Case((6, 11), Sizes(128), SM_80, limits=(3.1, 5.0)),
    Case((6, 11), Sizes(64), SM_80, limits=(3.1, 5.0)),
    Case((6, 11), Sizes(128), DETERMINISTIC),
    Case((6, 11), Sizes(64), DETERMINISTIC),
    *(Case((c, c), Sizes(d)) for c in (3, 7, 11) for d in (128, 64)),
)


def inputs(sizes: Sizes, kernel: tuple[int, int]) -> list[Tensor]:
    """q, k, v and the weight, all random."""
    torch.manual_seed(0)
    shape = (sizes.batch, 16, sizes.n, sizes.head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return [q, k, v, torch.randn(16, *kernel, device="cuda") / (kernel[0] * kernel[1]) ** 0.5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    peers: dict[Sizes, dict[str, dict[str, float]]] = {}
    rows = []
    for case in CASES:
        sizes = case.sizes
        if sizes not in peers:
            peers[sizes] = {}
            for name, backend in PEERS.items():
                with sdpa_kernel(backend):
                    plain = partial(scaled_dot_product_attention, is_causal=sizes.causal)
                    peers[sizes][name] = timings(plain, inputs(sizes, (1, 1))[:3], 120)
        op = mtagen.build(case.kernel, sizes.head_dim, causal=sizes.causal, backend="cuda", **dict(case.options))
        ours = timings(op, inputs(sizes, case.kernel), 120)
        row: dict[str, object] = {"kernel": case.kernel, **sizes._asdict(), **dict(case.options), **ours}
        verdicts = []
        for direction, limit in zip(("forward", "backward"), case.limits, strict=True):
            for name, peer in peers[sizes].items():
                row[f"{direction}/{name}"] = ours[f"{direction}_ms"] / peer[f"{direction}_ms"]
            if limit:
                met = row[f"{direction}/cudnn"] <= limit
                verdicts.append(f"{direction} {'within' if met else 'OVER'} {limit}")
        rows.append(row)
        what = f"{case.kernel} {sizes} {dict(case.options) or ''}"
        figures = "   ".join(f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
        print(f"{what}\n    {figures}   {', '.join(verdicts)}", flush=True)
    if args.json:
        sdpa = [{**sizes._asdict(), "name": name, **ms} for sizes, by in peers.items() for name, ms in by.items()]
        result = {"environment": environment(), "commit": commit(), "heads": 16, "sdpa": sdpa, "cases": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
