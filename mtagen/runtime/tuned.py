"""Tuning's tables of this machine, in the cache: one for each spec, target, device and set of
versions.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch

from ..errors import BackendError
from ..planner.tables import TUNED, Table
from ..spec import Spec
from .disk_cache import Cache, cache_key
from .nvrtc import toolchain
from .triton_package import triton_version

_FILE = "table.json"


def remember(spec: Spec, target: str, table: Table) -> None:
    """Store tuning's table for ``spec``; its decisions replace earlier ones.

    Raises:
        OSError: neither the cache nor a temporary directory can be written.
    """
    before = remembered(spec, target) or Table(TUNED)
    content = json.dumps(before.updated(table).to_dict(), indent=1).encode()
    Cache().get_or_build(*_entry(spec, target), lambda: {_FILE: content}, renew=True)


def remembered(spec: Spec, target: str) -> Table | None:
    """Return the table for ``spec`` on this GPU model with these package versions, or None if it
    was never tuned.
    """
    if not torch.cuda.is_available():
        return None
    entry = Cache().find(*_entry(spec, target))
    return None if entry is None else Table.from_dict(json.loads(entry.files[_FILE]), TUNED)


def describe_machine() -> dict[str, Any]:
    """Return the conditions of measurements: the device, and the versions of PyTorch and the
    compilers.
    """
    nvrtc = None
    with suppress(BackendError):
        nvrtc = toolchain().nvrtc
    versions = {"torch": torch.__version__, "triton": triton_version(), "nvrtc": nvrtc}
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def _entry(spec: Spec, target: str) -> tuple[str, str, str]:
    """Return the name, target and key of the cache entry."""
    name = f"tuned_cq{spec.cq}_ck{spec.ck}_d{spec.head_dim}_{spec.dtype}"
    return name, target, cache_key("tuned", spec.to_dict(), describe_machine())
