"""CUDA C++ to cubin, by NVRTC through ``cuda.core``: pip wheels alone, no GPU, no nvcc, no host compiler."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import BackendError, explain
from .disk_cache import Cache, cache_key

_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")  # the templates include them
_OPTIONS: dict[str, str | bool] = {"std": "c++17", "lineinfo": True}


@dataclass(frozen=True)
class Toolchain:
    """The installed compiler.

    Attributes:
        nvrtc: its version, e.g. ``13.0``.
        include: the folder of the CUDA headers.
        headers: sha256 of the headers that kernels include.
    """

    nvrtc: str
    include: Path
    headers: str


@cache
def toolchain() -> Toolchain:
    """Find the compiler and its headers.

    Raises:
        BackendError: a package is missing; the message says how to install it.
    """
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError, find_nvidia_header_directory
    except ImportError as error:
        raise _missing(str(error.name or error)) from None
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except DynamicLibNotFoundError:
        raise _missing("the NVRTC library") from None
    folder = find_nvidia_header_directory("cudart")  # the wheel's folder, if there is a wheel
    if folder is None:
        raise _missing("the folder of CUDA headers")
    include = Path(folder)
    digest = hashlib.sha256()
    for header in _HEADERS:
        if not (include / header).is_file():
            raise _missing(f"the header {header}")
        digest.update((include / header).read_bytes())
    return Toolchain(f"{major}.{minor}", include, digest.hexdigest())


def cuda_is_installed() -> bool:
    """Return whether :func:`toolchain` finds the compiler and its headers."""
    try:
        toolchain()
    except BackendError:
        return False
    return True


def _missing(what: str) -> BackendError:
    return BackendError(explain("backend", "cuda", f"{what} is missing", "pip install 'mtagen[cuda]', or 'triton'"))


def compile_cubin(source: str, arch: str, name: str = "kernels") -> bytes:
    """Compile CUDA C++ source to a cubin.

    Args:
        source: the source; its kernels are ``extern "C"``.
        arch: the architecture, e.g. ``sm_90a``.
        name: name of the source in compiler messages and line tables.

    Raises:
        BackendError: the compiler is missing, or refuses the source (the message holds its log).
    """
    include = toolchain().include
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(name=f"{name}.cu", arch=arch, include_path=[str(include)], **_OPTIONS)
    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core's type for it is private; the text holds the compiler's log
        raise BackendError(f"{name}.cu does not compile for {arch}: {str(error).strip(chr(0))}") from None


def cached_cubin(source: str, arch: str, name: str) -> bytes:
    """Return :func:`compile_cubin`'s cubin, from mtagen's cache if it is there.

    A cubin cannot be compared with rendered text. So its entry also holds the source and is valid
    only for an equal source; the manifest holds the digests of both.
    """
    tools = toolchain()
    key = cache_key(source, arch, _OPTIONS, tools.nvrtc, tools.headers)

    def build() -> dict[str, bytes]:
        return {f"{name}.cubin": compile_cubin(source, arch, name)}

    sources = {f"{name}.cu": source.encode()}
    entry = Cache().get_or_build(name, arch, key, build, {"nvrtc": tools.nvrtc}, sources=sources)
    return entry.files[f"{name}.cubin"]
