"""Small calls of every CUDA pass, to be run under compute-sanitizer on a GPU.

The driver refuses entry points that the Python bindings look for but it does not have: those are no errors of ours.

compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py
"""

from __future__ import annotations

import torch

import mtagen

SHAPES = (
    ((6, 11), 64, True, 1, 200),
    ((6, 11), 128, True, 2, 133),
    ((6, 11), 64, False, 1, 70),
    ((1, 1), 64, True, 1, 130),
    ((3, 3), 64, True, 1, 130),
    ((11, 11), 64, True, 1, 130),
    ((5, 17), 64, True, 1, 130),
)


def main() -> None:
    for kernel, d, causal, group, n in SHAPES:
        op = mtagen.build(kernel, d, causal=causal, backend="cuda")
        torch.manual_seed(0)
        q = torch.randn(1, 2, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, 2 // group, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        weight = torch.randn(2, *kernel, device="cuda", requires_grad=True)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            out = op(q, k, v, weight)
            torch.autograd.grad(out.float().square().sum(), (q, k, v, weight))
        with torch.no_grad():
            op.decode(q[:, :, -kernel[0] :], k, v, weight)
        torch.cuda.synchronize()
        print(op.plan.name, flush=True)


if __name__ == "__main__":
    main()
