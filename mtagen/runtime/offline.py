"""Compile kernels without a GPU, and read their usage: registers, spills, shared memory,
instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ..codegen import render
from ..dtypes import TORCH_DTYPES
from ..planner import Plan, get_target
from .launches import Launch, dry_run
from .load import load_host, load_tables
from .loaded import without_launches

# Triton's names of the dtypes.
_TYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.int32: "i32", torch.int64: "i64"}


# cuobjdump's report: a line per kernel with its resources; its listing: kernels, instructions between addresses.
_RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_FUNCTION = re.compile(r"Function : (\w+)\n(.*?)(?=\n\s*Function : |\Z)", re.DOTALL)
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """The resources and instructions of a compiled kernel.

    Attributes:
        registers: registers per thread.
        stack: bytes of stack per thread.
        shared: bytes of shared memory per CTA.
        disassemble: returns ``assembly``. The first call takes about as long as the compilation of
            a small kernel.
    """

    registers: int
    stack: int
    shared: int
    disassemble: Callable[[], str]

    @property
    def assembly(self) -> str:
        """The kernel's instructions, one per line."""
        return self.disassemble()

    @property
    def opcodes(self) -> Counter[str]:
        """Number of occurrences of each instruction, such as ``HMMA.16816.F32``, in the kernel."""
        return Counter(_OPCODE.findall(self.assembly))


def launches(plan: Plan) -> list[Launch]:
    """Return one launch of each Triton kernel, from small forward, backward and decode calls and the tables of their
    mask; nothing runs.
    """
    sources = render(plan)
    hosts = {pass_name: load_host(plan, sources, pass_name) for pass_name in plan.triton}
    with ExitStack() as stack:
        for module in dict.fromkeys(hosts.values()):  # passes of one lowering share a module
            stack.enter_context(without_launches(module))
        launched = dry_run(plan, hosts, torch.device("cpu"), load_tables(plan, sources))
    return [*{launch.kernel.__name__: launch for launch in launched}.values()]


def compile_offline(plan: Plan, part: str = "") -> dict[str, Usage]:
    """Compile every Triton kernel for the plan's target, without a GPU; return the usage by kernel
    name.

    Only kernels whose name contains ``part`` are compiled.

    On AMD, registers and stack stay 0.

    Raises:
        Exception: Triton cannot compile a kernel.
    """
    target = get_target(plan.target)
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    compiled = {
        launch.kernel.__name__: triton.compile(_source(launch), target=gpu, options=launch.options)
        for launch in launches(plan)
        if part in launch.kernel.__name__
    }
    if target.backend == "cuda":
        used = usage_of_cubins(*(kernel.asm["cubin"] for kernel in compiled.values()))
    else:
        used = {name: Usage(0, 0, 0, partial(str, kernel.asm["amdgcn"])) for name, kernel in compiled.items()}
    # Shared memory is dynamic, and not in the cubin.
    return {name: replace(used[name], shared=kernel.metadata.shared) for name, kernel in compiled.items()}


def _source(launch: Launch) -> ASTSource:
    kernel = launch.kernel
    arguments = dict(zip(kernel.arg_names, launch.args, strict=False))
    constants = {p.name: p.default for p in kernel.params if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.is_constexpr else p.annotation_type or _type_of(arguments[p.name])
        for p in kernel.params
    }
    # The host passes pointers that are aligned to 16 bytes.
    pointers = [i for i, p in enumerate(kernel.params) if signature[p.name].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    return ASTSource(kernel, signature, constexprs=constants, attrs=aligned)


def _type_of(value: object) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def usage_of_cubins(*cubins: bytes) -> dict[str, Usage]:
    """Read the usage of each kernel, by name, from cubins; shared memory is the static part.

    The reader is the triton package's cuobjdump, which needs no GPU.

    Args:
        cubins: cubins whose kernels have different names.
    """
    return {name: used for cubin in cubins for name, used in _usage_of_cubin(cubin).items()}


def _usage_of_cubin(cubin: bytes) -> dict[str, Usage]:
    @cache
    def listings() -> dict[str, str]:
        return dict(_FUNCTION.findall(_cuobjdump(cubin, "-sass")))

    def listing(kernel: str) -> str:
        return listings()[kernel]

    return {
        name: Usage(int(registers), int(stack), int(shared), partial(listing, name))
        for name, registers, stack, shared in _RESOURCES.findall(_cuobjdump(cubin, "-res-usage"))
    }


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
