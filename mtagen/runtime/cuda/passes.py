"""A pass of the CUDA backend: compiled once for an architecture, loaded once on a device, called like a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...codegen.cuda import render
from ...errors import BackendError, explain
from ...planner.backends import FusedPass
from .compiler import cached_cubin

if TYPE_CHECKING:
    from .kernel import LoadedKernel  # needs cuda.bindings, which may be missing


class CudaPass:
    """The host function of a pass with its plan and its kernels on each device where it was used.

    Args:
        pass_plan: the pass's plan.
        run: its host function, see :mod:`mtagen.runtime.cuda`.
    """

    def __init__(self, pass_plan: FusedPass, run: Callable[..., Any]) -> None:
        self._plan = pass_plan
        self._run = run
        self._kernels: dict[int, Mapping[str, LoadedKernel]] = {}

    def __call__(self, first: Tensor, *others: Any, **options: Any) -> Any:
        """Call the host function on the device of its tensors."""
        index = first.device.index
        kernels = self._kernels.get(index) or self.load(first.device)
        return self._run(kernels, self._plan, first, *others, **options)

    def load(self, device: torch.device) -> Mapping[str, LoadedKernel]:
        """Compile for a device, unless that has been done before, and load there."""
        return self._kernels.setdefault(device.index, load_pass(self._plan, device))


def cuda_pass(name: str, pass_plan: FusedPass) -> CudaPass:
    """The pass called ``forward``, ``backward`` or ``decode``."""
    return CudaPass(pass_plan, getattr(import_module(f".{name}", __package__), name))


def compile_pass(pass_plan: FusedPass, arch: str | None = None) -> bytes:
    """The cubin of a pass, from the cache if it is there; ``arch`` is by default the target's.

    Raises:
        BackendError: the compiler is missing, or refuses the source.
    """
    return cached_cubin(render(pass_plan), arch or pass_plan.target, pass_plan.name)


def load_pass(pass_plan: FusedPass, device: torch.device) -> dict[str, LoadedKernel]:
    """Render, compile (or find in the cache) and load the kernels of a pass on a device; role -> kernel.

    Raises:
        BackendError: the compiler is missing or refuses the source, or the driver does.
    """
    cubin = compile_pass(pass_plan, arch_for(pass_plan.target, torch.cuda.get_device_capability(device)))
    from .kernel import load_kernels

    return load_kernels(cubin, pass_plan.kernels, device)


def arch_for(target: str, capability: tuple[int, int]) -> str:
    """What sources planned for a target are compiled for on a GPU: its own architecture, for cubins run on no other.

    Raises:
        BackendError: the target's instructions are not those of the GPU.
    """
    version, specific = re.fullmatch(r"sm_(\d+)(a?)", target).groups()  # type: ignore[union-attr]
    here = 10 * capability[0] + capability[1]
    if here == int(version):
        return target
    if specific or here < int(version):
        rule = f"the GPU has compute capability {capability[0]}.{capability[1]}, which does not run its instructions"
        raise BackendError(explain("target", target, rule, "the target of this GPU, or backend='triton'"))
    return f"sm_{here}"
