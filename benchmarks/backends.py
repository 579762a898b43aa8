"""Time of CUDA's kernels over Triton's, pass by pass and shape by shape: the table that ``backend="auto"`` reads.

python benchmarks/backends.py --write
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import triton
from attention import make_inputs, median_ms

import mtagen
from mtagen import PlanError
from mtagen.planner.backends import PASSES
from mtagen.runtime.cuda.compiler import toolchain
from mtagen.runtime.load import Passes, load

KERNELS = ((1, 1), (3, 3), (6, 11), (7, 7), (11, 11))
HEAD_DIMS = (64, 128)
TRAINING = {"n": 8192, "heads": 16, "batch": 1}
DECODE = {"n": 32768, "heads": 16, "batch": 8}
BACKENDS = ("cuda", "triton")


def pass_ms(passes: Passes, name: str, kernel: tuple[int, int], d: int) -> float:
    """Median ms of one pass."""
    scale = d**-0.5
    q, k, v, weight = make_inputs(kernel, d, **(DECODE if name == "decode" else TRAINING))
    if name == "decode":
        q_tail = q[:, :, -kernel[0] :].contiguous()
        return median_ms(lambda: passes.decode(q_tail, k, v, weight, scale, None, None), 100)
    if name == "forward":
        return median_ms(lambda: passes.forward(q, k, v, weight, scale), 100)
    out, lse = passes.forward(q, k, v, weight, scale)
    grads = torch.randn_like(out), torch.zeros_like(lse)
    return median_ms(
        lambda: passes.backward(*grads, q, k, v, weight, out, lse, scale, deterministic=False),
        100,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the planner's table of this GPU's target")
    args = parser.parse_args()
    target = mtagen.planner.target_for_capability(torch.cuda.get_device_capability()).name
    ratios: dict[str, dict[str, float]] = {name: {} for name in PASSES}
    for kernel in KERNELS:
        for d in HEAD_DIMS:
            try:
                passes = {backend: load(mtagen.build(kernel, d, backend=backend).plan) for backend in BACKENDS}
            except PlanError as error:
                print(f"{kernel} d{d}: {error}")
                continue
            for name in PASSES:
                ms = {backend: pass_ms(passes[backend], name, kernel, d) for backend in BACKENDS}
                ratio = round(ms["cuda"] / ms["triton"], 3)
                ratios[name][f"{kernel[0]},{kernel[1]},{d}"] = ratio
                print(
                    f"{kernel} d{d} {name}: cuda {ms['cuda']:.3f} ms, triton {ms['triton']:.3f} ms, {ratio}", flush=True
                )
    table = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "nvrtc": toolchain().nvrtc},
        "sizes": {"forward, backward": TRAINING, "decode": DECODE},
        "cuda_over_triton": ratios,
    }
    if args.write:
        path = Path(mtagen.__file__).parent / f"planner/tables/{target}_backends.json"
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
