"""Small calls of every CUDA pass, to be run under compute-sanitizer on a GPU.

The driver refuses entry points that the Python bindings look for but it does not have: those are no errors of ours.

compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py --every-lane

An argument, ``convolution``, ``pipelines`` or ``heads``, chooses operators of one convolution before the softmax, those
in strips, or heads that mix on the chip. In the kernels of the last, one lane arrives at a barrier for its warp, after
``__syncwarp``, and racecheck does not know what that orders. With ``--every-lane`` every lane arrives.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple
from unittest import mock

import torch

import mtagen


class Case(NamedTuple):
    """An operator and sizes.

    Attributes:
        kernel: of the convolution before the softmax.
        head_dim: of queries, keys and values.
        n: queries and keys.
        causal: the mask.
        heads: of queries.
        group: of them for a head of keys.
        stages: besides that convolution.
    """

    kernel: tuple[int, int] | None
    head_dim: int
    n: int
    causal: bool = True
    heads: int = 2
    group: int = 1
    stages: dict[str, Any] = {}  # noqa: RUF012  # never changed


MIXTURES = {"mixed_heads": 16, "post_mixed_heads": 16}
CASES = {
    "convolution": (
        Case((6, 11), 64, 200),
        Case((6, 11), 128, 133, group=2),
        Case((6, 11), 64, 70, causal=False),
        Case((1, 1), 64, 130),
        Case((3, 3), 64, 130),
        Case((11, 11), 64, 130),
        Case((5, 17), 64, 130),
    ),
    "pipelines": (
        Case(
            (6, 11),
            64,
            200,
            heads=16,
            group=2,
            stages={"mixed_heads": 16, "post_kernel": (6, 11), "post_mixed_heads": 16},
        ),
        Case((3, 3), 128, 133, causal=False, heads=10, stages={"mixed_heads": 10, "post_mixed_heads": 2}),
        Case((6, 11), 128, 150, heads=4, group=2, stages={"post_mixed_heads": 2}),
        Case((6, 11), 64, 150, heads=4, group=2, stages={"post_mixed_heads": 2}),
        Case(None, 64, 130, stages={"post_kernel": (3, 5)}),
        Case(None, 128, 520, heads=16, group=16, stages=MIXTURES),  # several CTAs divide the heads of the group
    ),
    "heads": (
        Case(None, 64, 200, heads=16, stages=MIXTURES),
        Case(None, 64, 333, heads=16, group=4, stages=MIXTURES),
        Case(None, 64, 233, heads=16, group=2, stages={"mixed_heads": 16}),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OPERATORS", help=", ".join(CASES))
    parser.add_argument("--every-lane", action="store_true", help="every lane arrives at barriers")
    options = parser.parse_args()
    macro = {"define_macro": "EVERY_LANE_ARRIVES"} if options.every_lane else {}
    with mock.patch.dict("mtagen.runtime.nvrtc._OPTIONS", macro):
        for case in [case for name in options.operators or CASES for case in CASES[name]]:
            run(case)


def run(case: Case) -> None:
    kernel, d, n = case.kernel, case.head_dim, case.n
    op = mtagen.build(kernel, d, causal=case.causal, backend="cuda", **case.stages)
    torch.manual_seed(0)
    q = torch.randn(1, case.heads, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kv_shape = (1, case.heads // case.group, n, d)
    k, v = (torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    weights = {
        name: torch.randn(shape, device="cuda", requires_grad=True)
        for name, shape in op.plan.spec.weights(case.heads).items()
    }
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        out = op(q, k, v, **weights)
        torch.autograd.grad(out.float().square().sum(), (q, k, v, *weights.values()))
    with torch.no_grad():
        op.decode(q[:, :, -op.plan.spec.context - 1 :], k, v, **weights)
    torch.cuda.synchronize()
    print(op.plan.name, flush=True)


if __name__ == "__main__":
    main()
