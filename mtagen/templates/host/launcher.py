import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver


class Kernel:
    """A kernel on one device, called as ``kernel(grid, *arguments)``.

    Attributes:
        name: its entry point.
        codes: the types of its arguments.

    Args:
        name: entry point of the kernel.
        threads: threads of a block.
        shared: bytes of dynamic shared memory.
        codes: the types of its arguments, a letter each, in the codes of :mod:`struct`.
        module: the loaded cubin with the kernel.
        context: the driver context in which the cubin was loaded.
        device: index of the device.
    """

    def __init__(
        self, name: str, threads: int, shared: int, codes: str, module: Any, context: Any, device: int
    ) -> None:
        self.name, self.codes = name, codes
        self._threads, self._shared = threads, shared
        self._context, self._device = context, device
        function = checked(driver.cuModuleGetFunction(module, name.encode()), f"finding {name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, limit, shared), f"shared memory of {name}")
        self._function = int(function)

        # The driver takes an array of pointers to the arguments. Each launch writes the arguments; the driver has
        # copied them when it returns.
        self._pack_into = struct.Struct(codes).pack_into
        self._values = ctypes.create_string_buffer(struct.calcsize(codes))
        base = ctypes.addressof(self._values)
        places = [struct.calcsize(codes[: n + 1]) - struct.calcsize(code) for n, code in enumerate(codes)]
        self._pointers = (ctypes.c_void_p * len(codes))(*(base + place for place in places))
        self._parameters = ctypes.addressof(self._pointers)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.name} on cuda:{self._device}>"

    def __call__(self, grid: Sequence[int], *arguments: float) -> None:
        """Launch on PyTorch's current stream of the kernel's device, which must be the current device.

        Args:
            grid: blocks along x, then along y and z if there are more.
            arguments: numbers; a pointer is a result of ``Tensor.data_ptr()``.

        Raises:
            struct.error: the arguments do not fit the kernel's.
            RuntimeError: the driver refuses the launch.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            self._pack_into(self._values, 0, *arguments)
            self._launch(stream, grid, (*grid, 1, 1)[:3], self._parameters)

    def bound(self, grid: Sequence[int], addresses: Sequence[int]) -> Callable[..., None]:
        """Return a launch whose arguments lie at these addresses whenever it is called, with the stream."""
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        parameters, blocks = ctypes.addressof(pointers), (*grid, 1, 1)[:3]
        how = self._function, *blocks, self._threads, 1, 1, self._shared

        def launch(stream: int, *_: Any, keeps: Any = pointers) -> None:
            if driver.cuLaunchKernel(*how, stream, parameters, 0)[0]:
                self._launch(stream, grid, blocks, parameters)  # again, which mends or names what was wrong

        return launch

    def _launch(
        self, stream: int, grid: Sequence[int], blocks: tuple[int, ...], parameters: int, is_first: bool = True
    ) -> None:
        (status,) = driver.cuLaunchKernel(
            self._function, *blocks, self._threads, 1, 1, self._shared, stream, parameters, 0
        )
        if not status:
            return
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT and is_first:  # the thread's first use of the driver
            driver.cuCtxSetCurrent(self._context)
            self._launch(stream, grid, blocks, parameters, is_first=False)
        else:
            checked((status,), f"the launch of {self.name}, grid {grid},")


def load_kernels(cubin: bytes, kernels: Mapping[str, tuple[str, int, int, str]], index: int) -> dict[str, Kernel]:
    """Load a cubin on a device.

    Args:
        cubin: compiled kernels.
        kernels: of each kernel, by its role: name, threads, shared and codes, as :class:`Kernel` takes them.
        index: of the device.

    Returns:
        The kernels by role.

    Raises:
        RuntimeError: the driver refuses it.
    """
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # PyTorch's first call on a device makes its context
        context = checked(driver.cuCtxGetCurrent(), "finding the context")
        module = checked(driver.cuModuleLoadData(cubin), "loading a cubin")
        return {role: Kernel(*facts, module, context, index) for role, facts in kernels.items()}


def compile_source(source: Path, target: str, index: int) -> bytes:
    """Compile a file of kernels by NVRTC.

    Args:
        source: the file.
        target: the architecture it was generated for.
        index: of the device that the kernels will run on.

    Returns:
        The cubin.
    """
    from cuda.core import Program, ProgramOptions
    from cuda.pathfinder import find_nvidia_header_directory

    major, minor = torch.cuda.get_device_capability(index)
    arch = target if target.endswith("a") else f"sm_{major}{minor}"  # "a": it uses what this one alone has
    include = find_nvidia_header_directory("cudart")
    options = ProgramOptions(name=source.name, arch=arch, std="c++17", include_path=[str(include)])
    return bytes(Program(source.read_text(), "c++", options).compile("cubin").code)


def checked(result: Sequence[Any], what: str) -> Any:
    """The value that a call of the driver returned.

    Raises:
        RuntimeError: it returned an error.
    """
    status, *values = result
    if status:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{what} failed: {status.name}, {text.decode() if text else 'no description'}")
    return values[0] if values else None
