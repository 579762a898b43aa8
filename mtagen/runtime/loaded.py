"""The CUDA kernels that an emitted module has loaded, and functions in their place.

A module keeps its kernels in the table ``LOADED``, by source, index of the device and role. It loads
a source where the table has no entry of the device. mtagen writes to the table here only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType


@contextmanager
def intercepted(module: ModuleType, role: str, launch: Callable[..., None]) -> Iterator[None]:
    """Call ``launch(kernel, grid, *arguments)`` in place of the launches of a kernel, until the context ends.

    Args:
        module: has loaded the kernel on one device.
        role: the role of the kernel and of its source.
        launch: gets the kernel and the arguments of a launch.
    """
    (kernels,) = module.LOADED[role].values()
    kernel = kernels[role]
    kernels[role] = partial(launch, kernel)
    try:
        yield
    finally:
        kernels[role] = kernel
