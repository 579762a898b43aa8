"""Forward and backward of one op against eager PyTorch and SDPA without convolution, on this GPU.

python benchmarks/attention.py --backend triton --json benchmarks/results/h200_triton.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mtagen
from mtagen.environment import collect
from mtagen.runtime.load import load_triton
from mtagen.runtime.offline import recorded

CASES = [
    ((6, 11), 64),
    ((6, 11), 128),
    ((1, 1), 64),
    ((1, 1), 128),
    ((3, 3), 128),
    ((2, 9), 128),
    ((11, 11), 128),
]


def median_ms(run: Callable[[], object], milliseconds: int = 200) -> float:
    run()
    torch.cuda.synchronize()
    return float(triton.testing.do_bench(run, warmup=20, rep=milliseconds, return_mode="median"))


def timings(forward: Callable[..., Tensor], inputs: list[Tensor], milliseconds: int = 200) -> dict[str, float]:
    """Median forward and backward ms, and the peak MiB of forward + backward beyond inputs, output and gradients."""
    with torch.no_grad():
        ms = median_ms(lambda: forward(*inputs), milliseconds)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = forward(*inputs)
    grad = torch.randn_like(out)
    backward_ms = median_ms(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), milliseconds)
    del out
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    out = forward(*inputs)
    grads = torch.autograd.grad(out, inputs, grad)
    kept = sum(x.numel() * x.element_size() for x in (out, *grads))
    mib = (torch.cuda.max_memory_allocated() - base - kept) / 2**20
    return {"forward_ms": ms, "backward_ms": backward_ms, "extra_MiB": mib}


def make_inputs(kernel: tuple[int, int], head_dim: int, n: int, heads: int, batch: int) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, n, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(heads, *kernel, device="cuda") / (kernel[0] * kernel[1]) ** 0.5
    return [q, k, v, weight]


def breakdown(op: mtagen.MultiTokenAttention, inputs: list[Tensor]) -> dict[str, float]:
    """Median ms of every kernel of one forward and backward call."""
    module = load_triton(op.plan)
    scale = op.plan.spec.head_dim**-0.5
    with recorded(module) as launches:
        out, lse = module.forward(*inputs, scale)
        module.backward(torch.randn_like(out), torch.zeros_like(lse), *inputs, out, lse, scale)
    names = list(dict.fromkeys(launch.kernel.__name__ for launch in launches))
    ms = {}
    for name in names:
        mine = [launch for launch in launches if launch.kernel.__name__ == name]
        ms[f"{name.split('_cq')[0]} x{len(mine)}"] = median_ms(lambda mine=mine: [x.run() for x in mine], 20)
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "triton"))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many cases")
    parser.add_argument("--no-eager", action="store_true", help="leave out eager PyTorch, which is slow")
    parser.add_argument("--breakdown", action="store_true", help="time each kernel as well (--backend triton)")
    parser.add_argument("--memory", action="store_true", help="peak memory at 8k, 16k and 32k")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, object] = {
        "environment": environment(),
        "commit": commit(),
        "shape": vars(args) | {"json": None},
    }
    peers = {}
    for head_dim in (64, 128):
        q, k, v, _ = make_inputs((1, 1), head_dim, args.length, args.heads, args.batch)
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(backend):
                peers[f"{name} d{head_dim}"] = timings(
                    lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
                    [q, k, v],
                )
    results["sdpa"] = peers
    for name, peer in peers.items():
        print(f"{name:22} forward {peer['forward_ms']:8.3f} ms   backward {peer['backward_ms']:8.3f} ms")
    cases = {}
    for kernel, head_dim in CASES[: args.cases]:
        name = f"{kernel} d{head_dim}"
        inputs = make_inputs(kernel, head_dim, args.length, args.heads, args.batch)
        op = mtagen.build(kernel, head_dim, backend=args.backend)
        case = timings(op, inputs)
        for peer in ("cudnn", "flash"):
            for direction in ("forward", "backward"):
                case[f"{direction}/{peer}"] = case[f"{direction}_ms"] / peers[f"{peer} d{head_dim}"][f"{direction}_ms"]
        print(f"{name:22} " + "   ".join(f"{key} {value:.3f}" for key, value in case.items()), flush=True)
        if args.breakdown:
            for kernel_name, ms in breakdown(op, inputs).items():
                print(f"    {kernel_name:28} {ms:.3f}")
        if kernel == (6, 11) and not args.no_eager:
            eager = timings(mtagen.reference, inputs, 1)
            case |= {f"eager {key}": value for key, value in eager.items()}
            print(
                f"{'  eager':22} " + "   ".join(f"{key} {value:.3f}" for key, value in eager.items()),
                flush=True,
            )
        if kernel == (6, 11) and args.memory:
            for n in (8192, 16384, 32768):
                long = timings(op, make_inputs(kernel, head_dim, n, args.heads, args.batch), 50)
                case[f"extra_MiB N={n}"] = long["extra_MiB"]
                print(
                    f"    N={n}: " + "   ".join(f"{key} {value:.3f}" for key, value in long.items()),
                    flush=True,
                )
        cases[name] = case
    results["cases"] = cases
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def environment() -> dict[str, object]:
    """What the figures depend on."""
    return {name: value for name, value in collect().items() if name not in ("cache_dir", "platform")}


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
