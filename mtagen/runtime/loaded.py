"""The CUDA kernels that an emitted module has loaded, and functions in their place.

A module keeps its kernels in the table ``LOADED``, by source, index of the device and role. It loads
a source where the table has no entry of the device. mtagen writes to the table here only.

Recipes of a module's calls hold the kernels that they launch, so no call is made by a recipe while
something stands in for a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any


@contextmanager
def without_recipes(module: ModuleType) -> Iterator[None]:
    """Make each call launch by launch, until the context ends.

    Args:
        module: an emitted module, with recipes (``templates/host/recipes.py``) or without.
    """
    recipes = getattr(module, "RECIPES", None)
    with recipes.suspended() if recipes else nullcontext():
        yield


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
        with without_recipes(module):
            yield
    finally:
        kernels[role] = kernel


@contextmanager
def without_launches(module: ModuleType) -> Iterator[None]:
    """Launch no CUDA kernel in calls with tensors on the CPU, until the context ends.

    Args:
        module: an emitted module, with CUDA kernels or without.
    """
    tables: dict[str, dict[int | None, Any]] = getattr(module, "LOADED", {})
    loaded = {name: dict(table) for name, table in tables.items()}
    for name, table in tables.items():
        table[None] = dict.fromkeys(module.KERNELS[name], _no_launch)  # None is the index of the CPU
    try:
        yield
    finally:
        for name, table in tables.items():
            table.pop(None)
            table.update(loaded[name])


def _no_launch(grid: tuple[int, ...], *arguments: float) -> None:
    """Stand in for a kernel."""
