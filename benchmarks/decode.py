"""Decoding one token against a long cache: the generated kernels against SDPA's flash decoding, on this GPU.

Both read every key and value once, so DRAM bandwidth bounds both. ``--sweep`` tries the planner's candidate
tiles and several numbers of splits, and prints the fastest. Example:

    python benchmarks/decode.py --json benchmarks/results/h200_decode.json
    python benchmarks/decode.py --sweep --head-dim 64
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mtagen.accuracy import compare
from mtagen.environment import collect
from mtagen.naive import reference
from mtagen.planner import Plan, get_target, plan, target_for_capability
from mtagen.planner.backends import GENERATED
from mtagen.planner.tiling import Tile, candidates, resources
from mtagen.runtime.load import Passes, load, load_triton
from mtagen.spec import Spec


@dataclass(frozen=True)
class Case:
    """Sizes of one decode step."""

    batch: int
    length: int
    dim: int
    heads: int = 16
    kv_heads: int = 16
    new: int = 1

    @property
    def bytes(self) -> int:
        """What must be read: keys and values in bf16."""
        return 2 * 2 * self.batch * self.kv_heads * self.length * self.dim


CASES = [Case(batch, length, dim) for batch, length in ((8, 32768), (1, 131072)) for dim in (64, 128)]


def make_inputs(case: Case, kernel: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_tail, k_cache, v_cache, weight."""
    torch.manual_seed(0)
    bf16 = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q = bf16(case.batch, case.heads, kernel[0] - 1 + case.new, case.dim)
    k, v = (bf16(case.batch, case.kv_heads, case.length, case.dim) for _ in range(2))
    weight = torch.randn(case.heads, *kernel, device="cuda") / (kernel[0] * kernel[1]) ** 0.5
    return q, k, v, weight


def check(passes: Passes, kernel: tuple[int, int], dim: int) -> None:
    """Decode of a short cache, one token and many, against the reference in float64.

    Raises:
        SystemExit: the accuracy rule is broken.
    """
    for case in (Case(2, 2500, dim, 4, 4), Case(2, 700, dim, 8, 2, new=8)):
        q, k, v, weight = make_inputs(case, kernel)
        out, lse = passes.decode(q, k, v, weight, dim**-0.5, None, None)
        expected, eager = (
            [x[:, :, -case.new :] for x in reference(*(x.to(dtype) for x in (q, k, v, weight)), return_lse=True)]
            for dtype in (torch.float64, torch.bfloat16)
        )
        results = ("out", out, eager[0], expected[0]), ("lse", lse, eager[1], expected[1])
        for name, ours, theirs, exact in results:
            verdict = compare(ours, theirs, exact, terms=v.abs().max().item())
            if not verdict.ok:
                raise SystemExit(f"decode is wrong: {name} of {case}: {verdict}")


def median_ms(run: Any) -> float:
    run()
    torch.cuda.synchronize()
    return float(triton.testing.do_bench(run, warmup=25, rep=150, return_mode="median"))


def flash_ms(q: Tensor, k: Tensor, v: Tensor) -> float:
    """SDPA with the newest query alone; keys of grouped heads are given as they are."""
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return median_ms(lambda: scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=grouped))


def with_tile(base: Plan, role: str, tile: Tile) -> Plan:
    return replace(base, tiles=tuple((r, tile if r == role else t, s) for r, t, s in base.tiles))


def feasible(base: Plan, role: str) -> Iterator[Tile]:
    """The planner's candidates for one kernel that fit the target."""
    target = get_target(base.target)
    for tile in candidates(role, base.spec, base.lift, target):
        if resources(role, tile, base.spec, base.lift).shared <= target.shared_per_block:
            yield tile


def sweep(base: Plan, case: Case, inputs: tuple[Tensor, ...]) -> list[tuple[float, str]]:
    """(ms, tile and splits) of every candidate, the fastest first."""
    wide = "decode_wide" in base.decode.roles and case.heads // case.kv_heads * case.new > base.decode.narrow
    role = "decode_wide" if wide else "decode"
    owners = case.batch * case.kv_heads
    slots = get_target(base.target).multiprocessors
    counts = sorted({max(1, ctas * slots // owners) for ctas in (1, 2, 3, 4, 5, 6, 8, 12, 16)})
    found = []
    for tile in feasible(base, role):
        module = load_triton(with_tile(base, role, tile))
        try:
            run = {splits: partial(module.decode, *inputs, case.dim**-0.5, None, splits) for splits in (None, *counts)}
            found += [(median_ms(call), f"{role} {asdict(tile)} splits={splits}") for splits, call in run.items()]
        except Exception as error:  # a candidate that does not compile or fit is reported, not fatal
            print(f"{role} {tile}: {type(error).__name__} {str(error)[:90]}", flush=True)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="6,11", help="cq,ck (default 6,11)")
    parser.add_argument("--head-dim", type=int, action="append", help="only these head dims")
    parser.add_argument("--kv-heads", type=int, default=16, help="key heads, of 16 query heads (default 16)")
    parser.add_argument("--new", type=int, default=1, help="new tokens at once, 1..8 (default 1)")
    parser.add_argument("--sweep", action="store_true", help="try candidate tiles and numbers of splits")
    parser.add_argument("--top", type=int, default=8, help="candidates printed per case (default 8)")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    cq, ck = (int(size) for size in args.kernel.split(","))
    target = target_for_capability(torch.cuda.get_device_capability())
    table = Table("B", "Nk", "d", "backend", "decode ms", "flash ms", "ratio", "GB/s", "flash GB/s")
    rows = []
    for case in CASES:
        if args.head_dim and case.dim not in args.head_dim:
            continue
        case = replace(case, kv_heads=args.kv_heads, new=args.new)
        inputs = make_inputs(case, (cq, ck))
        flash = flash_ms(*inputs[:3])
        for backend in GENERATED:
            base = plan(Spec((cq, ck), case.dim), target, backend)
            passes = load(base)
            check(passes, (cq, ck), case.dim)
            if args.sweep and backend == "triton":
                print(f"{case}")
                for ms, text in sweep(base, case, inputs)[: args.top]:
                    print(f"  {ms:.4f} ms  {case.bytes / ms / 1e6:.0f} GB/s  {text}", flush=True)
            ours = median_ms(partial(passes.decode, *inputs, case.dim**-0.5, None, None))
            rows.append(
                {**asdict(case), "backend": backend, "decode_ms": ours, "flash_ms": flash, "ratio": ours / flash}
            )
            rates = [f"{case.bytes / ms / 1e6:.0f}" for ms in (ours, flash)]
            sizes = [str(size) for size in (case.batch, case.length, case.dim)]
            table.add_row(*sizes, backend, f"{ours:.4f}", f"{flash:.4f}", f"{ours / flash:.2f}", *rates)
        del inputs
        torch.cuda.empty_cache()
    Console(width=100).print(table)
    if args.json:
        environment = {name: value for name, value in collect().items() if name not in ("cache_dir", "platform")}
        report = {"kernel": [cq, ck], "target": target.name, "environment": environment, "results": rows}
        args.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
