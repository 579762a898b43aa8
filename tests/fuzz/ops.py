"""Build the op of a case on each backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import mtagen
from mtagen.cpu import attention, pipeline
from mtagen.ops.attention import assemble
from mtagen.planner import Plan
from mtagen.planner.lift.tiling import Tile
from mtagen.spec import Spec

from .case import Case

SMALL_TILE, SMALL_WORKSPACE = Tile(16, 32), 2**10
_STRIP_SCORES = pipeline.STRIP_SCORES
CPU_TILE, CPU_STRIP = 16, 800  # rows and columns of a small tile; scores of a small strip


@contextmanager
def ops_of(backend: str, folder: Path) -> Iterator[Callable[[Case], Any]]:
    """Yield a function that builds the op of a case; the op must be called before the next one is built.

    New floating-point memory holds NaN meanwhile, so that results of memory that nobody wrote are wrong.

    Args:
        backend: one of ``BACKENDS``.
        folder: where kernels are compiled, and generated modules are kept.
    """
    from poison import memory_starts_as_nan

    with pytest.MonkeyPatch.context() as patch:
        memory_starts_as_nan(patch)
        patch.setenv("MTAGEN_CACHE_DIR", str(folder / "cache"))
        if backend in ("interpreter", "emulator"):
            from lean_interpreter import lean_interpreter as settings
        else:
            settings = nullcontext
        makers = {
            "cpu": partial(_on_cpu, patch),
            "interpreter": _Planned("triton", folder),
            "emulator": _Planned("cuda", folder),
        }
        with settings():
            yield makers.get(backend, _on_gpu)


def _on_cpu(patch: pytest.MonkeyPatch, case: Case) -> Any:
    """Build an op of PyTorch ops, and set the sizes of tiles and strips."""
    for function in (attention.forward, attention.backward):
        patch.setitem(function.__kwdefaults__, "tile", CPU_TILE if case.small else attention.TILE)
    patch.setattr(pipeline, "STRIP_SCORES", CPU_STRIP if case.small else _STRIP_SCORES)
    return mtagen.build(**case.options, dropout=True, backend="torch")


class _Planned:
    """Builds ops whose kernels run on the CPU: Triton's in the interpreter, CUDA's in the emulator."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._backend, self._folder = backend, folder
        self._assembled = cache(self._assemble)

    def __call__(self, case: Case) -> Any:
        return self._assembled(case.spec, case.maker, case.small, case.dropout_p > 0)

    def _assemble(self, spec: Spec, target: str, small: bool, drops: bool) -> Any:
        from emulator import load_emulated
        from host_functions import retiled

        def plan_like(spec: Spec) -> Plan:
            planned = mtagen.plan(spec, target, self._backend)
            if small:
                planned = retiled(planned, SMALL_TILE, SMALL_WORKSPACE)
            if self._backend == "cuda":
                load_emulated(planned, self._folder)
            return planned

        return assemble(plan_like(spec), torch_on_cpu=False, deterministic=True, dropout=drops, plan_like=plan_like)


@cache
def _built(backend: str, packed: bool, dropout: bool, **options: Any) -> Any:
    return mtagen.build(**options, backend=backend, packed=packed, dropout=dropout, deterministic=True)


def _on_gpu(case: Case) -> Any:
    return _built(case.maker, case.call == "varlen", case.dropout_p > 0, **case.options)
