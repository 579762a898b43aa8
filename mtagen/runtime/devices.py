"""The GPUs of this machine: the target of each, and the GPUs on which kernels are loaded."""

from __future__ import annotations

import torch
from torch import distributed

from ..planner.targets import target_for_capability


def local_target() -> str:
    """Return the target of this machine's current GPU, or ``cpu`` without a GPU."""
    return target_of(torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"


def target_of(index: int) -> str:
    """Return the target of one GPU."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]  # without the features after it
    return target_for_capability(torch.cuda.get_device_capability(index)).name


def devices_for(target: str) -> list[torch.device]:
    """Return the GPUs on which kernels for a target are loaded when they are built; none without a
    GPU.

    These are all visible GPUs of the target, or the current GPU if no visible GPU is of the target.
    In a process of an initialised ``torch.distributed`` job it is the current GPU only: a loaded
    kernel takes hundreds of MB on a GPU, and the other GPUs belong to other processes.
    """
    if not torch.cuda.is_available():
        return []
    is_one_of_many = distributed.is_available() and distributed.is_initialized()
    alike = [] if is_one_of_many else [i for i in range(torch.cuda.device_count()) if target_of(i) == target]
    return [torch.device("cuda", index) for index in alike or [torch.cuda.current_device()]]
