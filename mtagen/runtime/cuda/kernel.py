"""Cubins loaded on a device, and their kernels launched on PyTorch's current stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterable
from typing import Any

import torch
from cuda.bindings import driver

from ...errors import BackendError
from ...planner.kernel import Kernel

_CODES = {"pointer": "P", "int": "i", "long long": "q", "float": "f"}  # C types -> struct's codes


class LoadedKernel:
    """A kernel on one device.

    Args:
        kernel: how it is launched.
        function: its handle.
        context: the driver context that it was loaded in.
        device: index of the device.
    """

    def __init__(self, kernel: Kernel, function: int, context: driver.CUcontext, device: int) -> None:
        self.kernel = kernel
        self._function = function
        self._context = context
        self._device = device
        codes = [_CODES[argument.kind] for argument in kernel.arguments]
        self._pack_into = struct.Struct("".join(codes)).pack_into
        # Written anew by every launch; the driver copies it before the launch returns.
        self._values = ctypes.create_string_buffer(max(1, struct.calcsize("".join(codes))))
        base = ctypes.addressof(self._values)
        places = [struct.calcsize("".join(codes[: n + 1])) - struct.calcsize(code) for n, code in enumerate(codes)]
        self._pointers = (ctypes.c_void_p * max(1, len(codes)))(*(base + place for place in places))
        self._parameters = ctypes.addressof(self._pointers)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.kernel.name} on cuda:{self._device}>"

    def __call__(self, grid: tuple[int, int, int], *arguments: float) -> None:
        """Launch on the current stream of the kernel's device, which must be the current device.

        Args:
            grid: blocks along x, y and z.
            arguments: as in ``kernel.arguments``; a pointer is what ``Tensor.data_ptr()`` gives.

        Raises:
            struct.error: the arguments do not fit the kernel's.
            BackendError: the driver refuses the launch.
        """
        status = self._launch(grid, arguments)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread's first use of the driver
            driver.cuCtxSetCurrent(self._context)
            status = self._launch(grid, arguments)
        if status:
            check((status,), f"the launch of {self.kernel.name}, grid {grid},")

    def _launch(self, grid: tuple[int, int, int], arguments: tuple[float, ...]) -> driver.CUresult:
        kernel, stream = self.kernel, torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            self._pack_into(self._values, 0, *arguments)
            (status,) = driver.cuLaunchKernel(
                self._function, *grid, kernel.threads, 1, 1, kernel.shared, stream, self._parameters, 0
            )
        return status


def load_kernels(cubin: bytes, kernels: Iterable[Kernel], device: torch.device) -> dict[str, LoadedKernel]:
    """Load a cubin on a device; role -> kernel.

    Raises:
        BackendError: the driver refuses it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # PyTorch makes the device's context with its first call
        context = check(driver.cuCtxGetCurrent(), "finding the context")
        module = check(driver.cuModuleLoadData(cubin), "loading a cubin")
        loaded = {}
        for kernel in kernels:
            function = check(driver.cuModuleGetFunction(module, kernel.name.encode()), f"finding {kernel.name}")
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, limit, kernel.shared), f"shared memory of {kernel.name}")
            loaded[kernel.role] = LoadedKernel(kernel, int(function), context, index)
    return loaded


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value that a driver call returned.

    Raises:
        BackendError: it returned an error.
    """
    status, *values = result
    if status:
        _, text = driver.cuGetErrorString(status)
        raise BackendError(f"{what} failed: {status.name}, {text.decode() if text else 'no description'}")
    return values[0] if values else None
