"""The note beside emitted CUDA sources: what a launcher of one's own needs to know."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from ..planner.backends import FusedPass
from ..planner.kernel import Kernel
from ..planner.plan import Plan
from .printers import python_code

_INTRODUCTION = """\
# {name}: how to launch it

The kernels are `extern "C"` and need the CUDA headers `cuda_fp16.h` and `cuda_bf16.h`: compile each file with NVRTC or
nvcc for `{target}` as C++17. Before the first launch of a kernel allow it its dynamic shared memory
(`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).

Tensors are laid out (B, H, N, D): q, out and their gradients with H heads and `n_q` rows, k, v and theirs with
H / `group` heads and `n_k` rows. Strides count elements, the last one is 1, rows start at multiples of 16 bytes.
`weight` is (H, {cq}, {ck}), contiguous fp32; `lse` is (B, H, `n_q`) fp32; `seqlens` is (B,), contiguous int32. The head
of each source explains its other buffers.
"""


def launch_note(plan: Plan) -> str:
    """Grid, block, shared memory and arguments of every CUDA kernel of a plan, as Markdown."""
    spec = plan.spec
    parts = [_INTRODUCTION.format(name=plan.name, target=plan.target, cq=spec.cq, ck=spec.ck)]
    parts += ["\n".join(_lines(fused)) for fused in plan.fused.values()]
    return "\n".join(parts)


def _lines(fused: FusedPass) -> Iterator[str]:
    yield f"## {fused.name}.cu"
    for kernel in fused.kernels:
        yield ""
        yield f"### {kernel.name}"
        yield ""
        yield from _facts(kernel)
    yield ""


def _facts(kernel: Kernel) -> Iterator[str]:
    yield f"- grid: {', '.join(map(python_code, kernel.grid))}"
    yield f"- block: {kernel.threads} threads"
    yield f"- dynamic shared memory: {kernel.shared} bytes"
    yield f"- registers: at most {kernel.registers} a thread"
    yield "- arguments:"
    for kind, arguments in groupby(kernel.arguments, key=attrgetter("kind")):
        yield f"  - {kind}: " + ", ".join(f"`{argument.name}`" for argument in arguments)
