"""Time tile candidates of each kernel on this GPU and print (or write) the fastest, in the planner's table format.

python benchmarks/sweep.py --kernel 6,11 --head-dim 128 --out mtagen/planner/tables/sm_90a.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton

from mtagen.dtypes import TORCH_DTYPES
from mtagen.op import _local_target
from mtagen.planner import Plan, get_target, plan
from mtagen.planner.tiling import TENSOR_ROLES, Tile, candidates, cost, resources, table_key
from mtagen.runtime.load import load_triton
from mtagen.runtime.offline import recorded
from mtagen.spec import Spec

KERNELS = {"forward": "fwd", "scores": "bwd_scores"}


def with_tile(base: Plan, role: str, tile: Tile) -> Plan:
    return replace(base, tiles=tuple((r, tile if r == role else t, s) for r, t, s in base.tiles))


def time_tile(job: tuple[Plan, str, Tile, int, int, bool]) -> float:
    """Median ms of all launches of one role's kernel in a whole pass; compiles only if ``measure`` is false."""
    base, role, tile, n, heads, measure = job
    try:
        module = load_triton(with_tile(base, role, tile))
        spec = base.spec
        dtype = TORCH_DTYPES[spec.dtype]
        torch.manual_seed(0)
        n = n if measure else 256
        q, k = (torch.randn(1, heads, n, spec.head_dim, device="cuda", dtype=dtype) for _ in range(2))
        v = torch.randn(1, heads, n, spec.value_head_dim, device="cuda", dtype=dtype)
        weight = torch.randn(heads, *spec.kernel, device="cuda") / (spec.cq * spec.ck) ** 0.5
        with recorded(module) as launches:
            out, lse = module.forward(q, k, v, weight, spec.head_dim**-0.5)
            if role != "forward":
                module.backward(v, torch.zeros_like(lse), q, k, v, weight, out, lse, spec.head_dim**-0.5)
        torch.cuda.synchronize()
        if not measure:
            return 0.0
        name = f"mta_{KERNELS.get(role, 'bwd_' + role)}_cq"
        mine = [launch for launch in launches if launch.kernel.__name__.startswith(name)]
        return float(
            triton.testing.do_bench(lambda: [launch.run() for launch in mine], warmup=5, rep=25, return_mode="median")
        )
    except Exception as error:  # a candidate that does not compile or fit is reported, not fatal
        print(f"{role} {tile}: {type(error).__name__} {str(error)[:90]}", flush=True)
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", action="append", default=None, help="cq,ck; repeatable")
    parser.add_argument("--head-dim", action="append", type=int, default=None)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--non-causal", action="store_true")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--top", type=int, default=10, help="candidates per kernel, by the cost model")
    parser.add_argument("--out", type=Path, help="table to update")
    args = parser.parse_args()
    target = get_target(_local_target("triton", False))
    winners = {}
    jobs: dict[tuple[str, str], list[tuple[Plan, str, Tile, int, int, bool]]] = {}
    for kernel in args.kernel or ["6,11"]:
        for head_dim in args.head_dim or [64, 128]:
            cq, ck = map(int, kernel.split(","))
            base = plan(Spec((cq, ck), head_dim, causal=not args.non_causal, dtype=args.dtype), target, "triton")
            for role, chosen, _ in base.tiles:
                if role not in TENSOR_ROLES:
                    continue
                fits = [
                    tile
                    for tile in candidates(role, base.spec, base.lift, target)
                    if resources(role, tile, base.spec, base.lift).shared <= target.shared_per_block
                    and resources(role, tile, base.spec, base.lift).registers <= 1.15 * target.registers_per_thread
                ]
                fits.sort(key=lambda tile, role=role, base=base: cost(role, tile, base.spec, base.lift, target))
                tiles = list(dict.fromkeys([chosen, *fits[: args.top]]))
                key = table_key(role, base.spec, base.lift)
                jobs[(f"{kernel} d{head_dim}", key)] = [(base, role, t, args.length, args.heads, True) for t in tiles]
    everything = [(*job[:-1], False) for group in jobs.values() for job in group]
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time_tile, everything))
    for (case, key), group in jobs.items():
        times = sorted(((time_tile(job), i) for i, job in enumerate(group)))
        print(f"{case} | {key}")
        for ms, i in times[:5]:
            tile = group[i][2]
            note = "<- plan" if i == 0 else ""
            print(
                f"    {ms:8.3f} ms  {tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages} "
                f"{tile.pipeline} u{tile.unroll} {note}",
                flush=True,
            )
        if times[0][0] < float("inf"):
            winners[key] = {**asdict(group[times[0][1]][2])}
    if args.out:
        table = json.loads(args.out.read_text()) if args.out.exists() else {"tiles": {}}
        table["device"] = torch.cuda.get_device_name()
        table["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
        table["tiles"] = dict(sorted({**table["tiles"], **winners}.items()))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
