"""Emitted CUDA kernels run on the CPU: compiled by g++ against ``emulator.h``, which plays the device."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mtagen.codegen.cuda import render
from mtagen.planner.backends import FusedPass

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
_TYPES = {
    "pointer": ctypes.c_void_p,
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
}


def emulated(plan: FusedPass, folder: Path, seed: int) -> dict[str, Callable[..., None]]:
    """The kernels of a pass, role -> kernel, to be called like loaded ones, of tensors on the CPU.

    Args:
        plan: a pass without wgmma.
        folder: where to compile it.
        seed: of the order in which warps run; copies are late if it is odd.
    """
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    if not library.exists():
        source.write_text(_for_host(plan))
        options = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{Path(__file__).parent}")
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))

    def kernel(role: str, types: list[type]) -> Callable[..., None]:
        function = loaded[f"launch_{role}"]
        function.argtypes = [ctypes.c_int] * 3 + types

        def launch(grid: tuple[int, int, int], *arguments: float) -> None:
            assert function(*grid[:2], seed, *arguments) == 0, f"{role}: shared memory out of bounds or not aligned"

        return launch

    return {kernel_.role: kernel(kernel_.role, [_TYPES[c] for c, _ in kernel_.arguments]) for kernel_ in plan.kernels}


def _for_host(plan: FusedPass) -> str:
    """The source with the emulator's instructions for its own, and a C function that launches each kernel."""
    source = render(plan)
    addresses = source.index("// Byte address of 16-byte column")  # the one part of the instructions that is plain C++
    source = '#include "emulator.h"\n' + source[addresses:]
    source = re.sub(r"extern __shared__ [^;]*;", "unsigned char* const shared = emulated_shared;", source)
    assert "asm" not in source
    for kernel in plan.kernels:
        types = re.search(rf"{kernel.name}\((.*?)\) {{", source, re.DOTALL)
        assert types
        casts = [declared.replace("__restrict__", "").rsplit(None, 1)[0] for declared in types[1].split(",")]
        names = [name for _, name in kernel.arguments]
        declared = ", ".join(f"{c.replace('pointer', 'void*')} {name}" for c, name in kernel.arguments)
        passed = ", ".join(f"({cast}){name}" for cast, name in zip(casts, names, strict=True))
        source += f"""
extern "C" int launch_{kernel.role}(int x, int y, int seed, {declared}) {{
  return run_grid(x, y, {kernel.threads}, {kernel.shared}, seed, [=] {{ {kernel.name}({passed}); }});
}}
"""
    return source
