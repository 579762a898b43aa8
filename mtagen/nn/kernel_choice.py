"""Who computes rows beside attention: Triton kernels, a compiler or PyTorch. This module does not import Triton."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from ..config import Config
from ..ops.checks import is_aligned
from ..runtime.triton_package import triton_is_installed

DTYPES = torch.bfloat16, torch.float16, torch.float32


@cache
def _devices_of_kernels() -> frozenset[str]:
    """Return the types of devices on which Triton's kernels run here."""
    if not triton_is_installed():
        return frozenset()
    return frozenset(("cuda", "cpu") if Config.from_env().triton_interpret else ("cuda",))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """Return whether a program is exported, asked while it is traced.

    If a traced call asks, torch 2.11 returns true for compiled calls, too.
    """
    return torch.compiler.is_exporting()


def is_fused() -> bool:
    """Return whether a compiler fuses the operations of a call.

    Exported programs consist of the operations of eager calls and return the same bits.
    """
    return torch.compiler.is_compiling() and not _is_exporting()


def has_kernels(x: Tensor, *parameters: Tensor) -> bool:
    """Return whether Triton's kernels compute rows of ``x``; PyTorch's operations do otherwise.

    The kernels serve GPUs in eager calls. Compilers and transforms of functions take the operations.
    """
    return (
        not torch.compiler.is_compiling()
        and x.device.type in _devices_of_kernels()
        and x.dtype in DTYPES
        and x.ndim in (3, 4)
        and x.numel() > 0
        and is_aligned(x)
        and all(type(y) in (Tensor, Parameter) for y in (x, *parameters))
        and all(y.is_contiguous() for y in parameters)
        and not torch._C._are_functorch_transforms_active()
    )
