"""Facts about the machine for bug reports, printed by ``mtagen collect-env``."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

from .config import Config
from .errors import BackendError
from .runtime.nvrtc import toolchain
from .version import __version__


def collect() -> dict[str, Any]:
    """Collect JSON-ready facts about the machine.

    A value is ``None`` or an empty list where the machine lacks the thing. GPU memory is in bytes.

    Raises:
        SpecError: as :meth:`mtagen.config.Config.from_env`.
    """
    return {
        "mtagen": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in ("triton", "cuda-core", "cuda-bindings")},
        "nvrtc": _nvrtc_version(),
        "cuda_runtime": torch.version.cuda,
        "cuda_driver": collect_env.get_nvidia_driver_version(collect_env.run),  # type: ignore[no-untyped-call]
        "gpus": _gpus(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cache_dir": str(Config.from_env().cache_dir),
    }


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _nvrtc_version() -> str | None:
    """Ask NVRTC itself for its version, because wheels, conda and toolkits all install it."""
    with suppress(BackendError):
        return toolchain().nvrtc
    return None


def _gpus() -> list[dict[str, Any]]:
    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a GPU is there, but its driver does not work
        return [{"error": str(error)}]
    return [
        {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "sm_count": gpu.multi_processor_count,
            "memory": gpu.total_memory,
        }
        for gpu in found
    ]


def _cpu_name() -> str | None:
    # platform.processor() is empty on most Linux systems.
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or None
