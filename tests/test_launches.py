"""Triton kernels of a new op: compiled several at once, then launched; on a driver that stands in for a GPU's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mtagen import Plan, Spec, plan
from mtagen.codegen import render
from mtagen.planner.targets import get_target
from mtagen.runtime import documents
from mtagen.runtime import load as runtime
from mtagen.runtime.document_kernel import schedule_documents
from mtagen.runtime.launches import recorded

PLAN = plan(Spec((2, 3), 16), "sm_90a", "triton")


class Compiler:
    """Stands in for Triton's compiler and its driver.

    Attributes:
        events: ("compiled", kernel) and ("launched", kernel), in turn.
        failing: part of the name of kernels that do not compile.
        together: where compilations wait for one another, if they must.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.failing: str | None = None
        self.together: threading.Barrier | None = None
        row = get_target(PLAN.target)
        target = GPUTarget(row.backend, row.arch, row.warp_size)
        stand_in = SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
        patch.setattr(driver, "_active", stand_in)
        patch.setattr(triton.compiler, "compile", self.compile)
        patch.setattr(runtime, "devices_for", lambda target: [torch.device("cpu")])
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda: None)

    def compile(self, source: SimpleNamespace, **_: object) -> SimpleNamespace:
        name = source.fn.__name__
        if self.together:
            self.together.wait(timeout=10)
        if self.failing and self.failing in name:
            raise RuntimeError(f"{name} does not compile")
        self.events.append(("compiled", name))
        return SimpleNamespace(
            run=lambda *_: self.events.append(("launched", name)),
            function=None,
            packed_metadata=None,
            launch_metadata=lambda *_: None,
        )

    def of(self, kind: str) -> list[str]:
        return [name for what, name in self.events if what == kind]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    yield Compiler(monkeypatch)
    forget(loaded(PLAN))


def loaded(made: Plan) -> ModuleType:
    return runtime.load_host(made, render(made), "forward")


def forget(module: ModuleType) -> None:
    """What a module's kernels keep of the compiler that made them."""
    for value in vars(module).values():
        if isinstance(value, triton.JITFunction):
            value.device_caches.clear()


def build() -> None:
    runtime.compile_kernels(PLAN, render(PLAN))


def test_all_are_compiled_before_the_first_is_launched(compiler: Compiler) -> None:
    build()
    names = {kernel.name for one in PLAN.lift.values() for kernel in one.kernels}
    compiled = len(names)
    assert {*compiler.of("compiled")} == {*compiler.of("launched")} == names
    assert [what for what, _ in compiler.events[: compiled + 1]] == ["compiled"] * compiled + ["launched"]
    assert len(compiler.of("compiled")) == compiled
    build()
    assert len(compiler.of("compiled")) == compiled


def test_several_at_once(compiler: Compiler) -> None:
    kernels = {kernel.name for one in PLAN.lift.values() for kernel in one.kernels}
    compiler.together = threading.Barrier(3)  # it breaks if fewer compile at once, and what waited does not compile
    assert len(kernels) % 3 == 0
    build()
    assert len(compiler.of("compiled")) == len(kernels)


def test_what_does_not_compile_says_why(compiler: Compiler) -> None:
    compiler.failing = "_bwd_dq_"
    with pytest.raises(RuntimeError, match=r"mta_lift_bwd_dq_\w+ does not compile"):
        build()
    compiler.failing = None
    build()  # nothing is left of the failure
    assert any("_bwd_dq_" in name for name in compiler.of("launched"))


def test_inside_a_mode_of_the_callers(compiler: Compiler) -> None:
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        build()
    assert compiler.of("launched")


def test_other_threads_launch_meanwhile(compiler: Compiler) -> None:
    module = loaded(PLAN)
    x = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)

    def call() -> None:
        module.forward(x, x, x, torch.zeros(2, 2, 3), 1.0)

    with recorded(module, run=False) as launches, ThreadPoolExecutor(1) as thread:
        call()
        mine = len(launches)
        assert mine
        assert not compiler.events
        thread.submit(call).result()
        assert len(launches) == mine
    assert len(compiler.of("launched")) == mine


def test_tables_of_a_mask(compiler: Compiler) -> None:
    """Beside CUDA's kernels, too; parameters may be of both dtypes."""
    mask = {"causal": False, "visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}}
    made = plan(Spec((2, 3), 16, **mask), "sm_90a", "triton")
    sources = render(made)
    module = runtime.load_tables(made, sources)
    assert module is not None
    runtime.compile_kernels(made, sources)
    names = ["mask_rows", "mask_rows_and_extremes", "mask_step"]
    times = Counter(name for name in compiler.of("compiled") if name.startswith("mask_"))
    assert times == dict.fromkeys(names, 2) | {"mask_keys": 1}
    assert {*times} <= {*compiler.of("launched")}
    compiler.events.clear()
    for length in (2, 16, 130):  # whatever the sizes and the address of parameters
        for prefix in torch.zeros(5, dtype=torch.int32).split(1):
            module.backward_tables(torch.zeros(1, 2, length, 16), prefix, length + 1)
    assert not compiler.of("compiled")
    forget(module)


def test_schedule_of_documents(compiler: Compiler) -> None:
    """It is compiled once, whatever the sizes and addresses of a call."""
    made = plan(Spec((2, 3), 16, packed=True), "sm_90a", "triton")
    runtime.compile_kernels(made, render(made))
    name = schedule_documents.__name__
    assert compiler.of("compiled").count(name) == compiler.of("launched").count(name) == 1
    compiler.events.clear()
    orders = ("later", "earlier"), ("longest", None), (None, None)
    for number, tile, orders_of_call in zip((1, 16, 130), (1, 128, 64), orders, strict=True):
        cu_seq = torch.zeros(number + 2, dtype=torch.int32)[1:]
        rows, keys = (order and (16 * number, order) for order in orders_of_call)
        for total_k in (None, 2 * number):
            documents._schedule(cu_seq, cu_seq, number, total_k, tile, rows, keys, number - 1)
    assert compiler.of("launched") == [name] * 6
    assert not compiler.of("compiled")
    schedule_documents.device_caches.clear()
    forget(loaded(made))
