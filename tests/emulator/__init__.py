"""Emitted CUDA kernels run on the CPU: compiled by the host's compiler against ``device.h``, which plays the device.

What does not depend on a kernel is in ``device.cpp``: half of the time that a kernel would else take to compile.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from single_pass import host_module

from mtagen import codegen
from mtagen.codegen.cuda import render
from mtagen.codegen.host import codes
from mtagen.planner import Plan
from mtagen.planner.kernel import Kernel
from mtagen.planner.strip.source import StripSource
from mtagen.planner.targets import TARGETS
from mtagen.planner.tile.passes import TilePass
from mtagen.runtime.load import load_host

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
OPTIONS = ("-std=c++17", "-Og", "-march=native", "-D_FORTIFY_SOURCE=0", "-w", "-shared", "-fPIC")
MMA_TARGETS = tuple(name for name, target in TARGETS.items() if "mma" in target.matrix)  # whose kernels it runs
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler: c++ or g++")

# A function from the left margin to its end, with its comment and template parameters.
_FUNCTION = re.compile(r"(?:^//.*\n)*(?:^template .*\n)?^DEVICE .*?\((?:.*[;}]\n|[\s\S]*?^}\n)", re.MULTILINE)
_TYPES = {
    "pointer": ctypes.c_void_p,
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
}


class EmulatedKernel:
    """A kernel that runs on the CPU, called as a loaded one is, with tensors on the CPU. The first call compiles it.

    Args:
        plan: the pass that it is of, or the source.
        kernel: how it is launched.
        folder: see :func:`emulated`.
        seed: of the order in which warps run; copies and wgmma are late if it is odd.
        checked: report races in shared memory. Takes several times as long.
    """

    def __init__(self, plan: TilePass | StripSource, kernel: Kernel, folder: Path, seed: int, checked: bool) -> None:
        self.kernel = kernel
        self._plan = plan
        self._folder = folder
        self._seed = seed
        self._checked = checked

    def __call__(self, grid: tuple[int, ...], *arguments: float) -> None:
        """Run to the end.

        Raises:
            AssertionError: a deadlock, an access out of bounds or not aligned, a race, a misuse of an instruction.
        """
        kinds = [_TYPES[argument.kind] for argument in self.kernel.arguments]
        values = [kind(value) for kind, value in zip(kinds, arguments, strict=True)]
        self.bound(grid, [ctypes.addressof(value) for value in values])()

    @property
    def codes(self) -> str:
        """The types of its arguments, as a loaded kernel has them."""
        return codes(self.kernel)

    def bound(self, grid: tuple[int, ...], addresses: Sequence[int]) -> Callable[..., None]:
        """A launch whose arguments lie at these addresses, as a loaded kernel makes it."""
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        blocks = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))

        def launch(*_: Any) -> None:
            error = self._launcher(blocks, self._seed, self._checked, pointers)
            assert not error, f"{self.kernel.name}: {error.decode()}"

        return launch

    @functools.cached_property
    def _launcher(self) -> ctypes._FuncPointer:
        launcher = ctypes.CDLL(str(_compiled(self._plan, self._folder)))[f"launch_{_alias(self.kernel)}"]
        launcher.restype = ctypes.c_char_p
        return launcher


def emulated(
    plan: TilePass | StripSource, folder: Path, seed: int = 0, *, checked: bool = False
) -> Mapping[str, EmulatedKernel]:
    """The kernels of a pass, or of one source of a strip's, role -> kernel.

    Args:
        plan: the pass, or the source.
        folder: where it is compiled, once.
        seed: see :class:`EmulatedKernel`.
        checked: see :class:`EmulatedKernel`.
    """
    return {kernel.role: EmulatedKernel(plan, kernel, folder, seed, checked) for kernel in plan.kernels}


def _compiled(plan: TilePass | StripSource, folder: Path) -> Path:
    """The library of a pass or source. Sources that differ in no more than their names share one."""
    source = for_host(plan)
    for kernel in plan.kernels:
        source = source.replace(kernel.name, _alias(kernel))
    source = source.replace(plan.name, "emulated")
    library = folder / f"{hashlib.sha256(source.encode()).hexdigest()}.so"
    if not library.exists():
        includes, device = (f"-I{folder}", f"-I{HERE}"), folder / "device.so"
        if not device.exists():
            _compile("-x", "c++-header", str(HERE / "device.h"), to=folder / "device.h.gch")
            _compile(str(HERE / "device.cpp"), *includes, to=device)
        _compile("-x", "c++", "-", "-x", "none", str(device), *includes, to=library, source=source)
    return library


def _alias(kernel: Kernel) -> str:
    """What an emulated kernel is called, whatever it is of."""
    return f"emulated_{kernel.role}"


def _compile(*arguments: str, to: Path, source: str = "") -> None:
    """Run the compiler. Of processes that compile the same at once, each leaves a whole file."""
    assert COMPILER
    mine = to.with_name(f"{to.name}.{os.getpid()}")
    command = [COMPILER, *OPTIONS, *arguments, "-o", str(mine)]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr[:4000]
    mine.replace(to)


def host_function(
    plan: TilePass,
    folder: Path,
    seed: int = 0,
    *,
    checked: bool = False,
    splits: int | None = None,
    together: int | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The emitted host function of a pass, with emulated kernels, which are compiled at the first call.

    Args:
        plan: the pass.
        folder: see :func:`emulated`.
        seed: see :class:`EmulatedKernel`.
        checked: see :class:`EmulatedKernel`.
        splits: parts that the host makes of the keys, whatever their number; by default as its rule says.
        together: heads whose CTAs run beside each other, likewise.
    """
    module = host_module(plan)
    kernels = {role: emulated(source, folder, seed, checked=checked) for role, source in plan.cuda.items()}
    if splits is not None:
        module._splits = lambda *_: splits  # type: ignore[attr-defined]
    if together is not None:
        module._together = lambda *_: together  # type: ignore[attr-defined]

    def call(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        for role, of_source in kernels.items():
            module.LOADED[role][None] = of_source  # the index of a CPU
        return getattr(module, plan.pass_name)(*arguments, **options)

    return call


def load_emulated(planned: Plan, folder: Path, seed: int = 0, *, checked: bool = False) -> None:
    """Load the modules of a plan, whose CUDA kernels are emulated and whose Triton kernels the interpreter runs.

    Args:
        planned: the plan.
        folder: see :func:`emulated`.
        seed: see :class:`EmulatedKernel`.
        checked: see :class:`EmulatedKernel`.
    """
    sources = codegen.render(planned)
    for pass_name in sources.hosts:
        module = load_host(planned, sources, pass_name)
        for name in getattr(module, "SOURCES", ()):
            module.LOADED[name][None] = emulated(planned.cuda[name], folder, seed, checked=checked)  # a CPU's index


def for_host(plan: TilePass | StripSource) -> str:
    """The emitted source, in which ``device.h`` stands for CUDA's headers and for every function of inline PTX."""
    source = _FUNCTION.sub(lambda match: "" if "asm" in match[0] else match[0], render(plan))
    source = re.sub(r"^#include <cuda_\w+\.h>\n", "", source, flags=re.MULTILINE)
    shared = r"\1* const \2 = reinterpret_cast<\1*>(emulator::memory + emulator::BASE);"
    source = re.sub(r"extern __shared__ __align__\(\d+\) ([\w ]+) (\w+)\[\];", shared, source)
    assert not re.search(r"\basm\b", source)
    wgmmas = [_wgmma(w) for w in getattr(plan, "wgmmas", ())]
    launchers = [f"EMULATED_KERNEL({kernel.name}, {kernel.threads}, {kernel.shared})" for kernel in plan.kernels]
    return "\n".join(['#include "device.h"', *wgmmas, source, *launchers, ""])


def _wgmma(w: object) -> str:
    """One warpgroup product under the name that the source calls it by."""
    element = {"bf16": "__nv_bfloat16", "f16": "__half"}[w.element]
    flags = ", ".join(str(x).lower() for x in (w.a_in_registers, w.a_transposed, w.b_transposed))
    a, operands = ("const u32 (&a)[4]", "a, 0") if w.a_in_registers else ("u64 a", "nullptr, a")
    return (
        f"inline void {w.name}(float (&d)[{w.n // 2}], {a}, u64 b, bool accumulate) {{\n"
        f"  emulator::wgmma<{element}, {w.n}, {flags}>(d, {operands}, b, accumulate);\n}}\n"
    )
