"""The optional triton package: only code that loads or compiles a Triton kernel imports it."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from ..config import Config
from ..errors import BackendError, explain
from ..planner.choice import INSTALL


def triton_is_installed() -> bool:
    """Return whether the package is installed, without importing it."""
    return find_spec("triton") is not None


@cache
def _serves(device_type: str) -> bool:
    return (device_type == "cuda" or Config.from_env().triton_interpret) and triton_version() is not None


def serves(x: Tensor) -> bool:
    """Return whether Triton kernels run on a tensor's device: a GPU, or the CPU by Triton's interpreter."""
    return _serves(x.device.type)


def require_triton() -> None:
    """Check that Triton kernels can be loaded.

    Raises:
        BackendError: the package is missing, or cannot be imported; the message says how to install it.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        rule = f"the triton package cannot be imported ({error})"
        raise BackendError(explain("backend", "triton", rule, f"{INSTALL['triton']}, or another backend")) from None


def triton_version() -> str | None:
    """Import the package and return its version; None if the import fails."""
    with suppress(ImportError):
        import triton

        return str(triton.__version__)
    return None
