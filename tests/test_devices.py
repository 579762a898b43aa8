"""Which GPUs kernels are compiled for and loaded on when an op is built: with stand-ins, and on two GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mtagen
from mtagen import BackendError, Plan, Spec, plan
from mtagen.codegen import render
from mtagen.runtime import launches, offline
from mtagen.runtime import load as runtime
from mtagen.runtime.devices import devices_for, local_target

SPEC = Spec((2, 3), 16)
H200, A100, B200, L40S = (9, 0), (8, 0), (10, 0), (8, 9)


class Gpus:
    """Stands in for ``torch.cuda`` on a machine with GPUs of these compute capabilities.

    Attributes:
        exercised: the devices on which Triton's kernels were launched.
        compiled: the architectures that CUDA kernels were compiled for.
    """

    def __init__(self, patch: pytest.MonkeyPatch, capabilities: Sequence[tuple[int, int]], current: int = 0) -> None:
        self.current, self.exercised, self.compiled = current, [], []  # type: ignore[var-annotated]
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        patch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "device", self.device)
        patch.setattr(launches, "compile_launches", lambda made, hosts, device, tables: None)
        patch.setattr(launches, "exercise", self.exercise)
        patch.setattr(runtime, "cached_cubin", self.compile)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def exercise(self, made: object, module: object, device: torch.device, passes: object) -> None:
        assert device.index == self.current, "kernels are launched on the current device"
        self.exercised.append(device.index)

    def compile(self, source: str, arch: str, name: str) -> bytes:
        self.compiled.append(arch)
        return arch.encode()


def indices(target: str) -> list[int | None]:
    return [device.index for device in devices_for(target)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What launches the CUDA kernels of a plan for H200s, with none loaded."""
    return launcher(plan(SPEC, "sm_90a", "cuda"), monkeypatch)


def launcher(made: Plan, patch: pytest.MonkeyPatch) -> ModuleType:
    """The module that launches the CUDA kernels of a plan; what it loads is the name of an architecture."""
    module = runtime.load_host(made, render(made), "forward")
    patch.setattr(module, "LOADED", {name: {} for name in module.SOURCES})
    patch.setattr(module, "load_kernels", lambda cubin, kernels, index: cubin.decode())
    return module


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_for("sm_90a") == []
    assert local_target() == "cpu"


def test_every_gpu_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, [H200, A100, H200, B200, L40S])
    assert local_target() == "sm_90a"
    assert indices("sm_90a") == [0, 2]
    assert indices("sm_80") == [1, 3]  # a B200 has no row of its own
    assert indices("sm_89") == [4]


def test_the_current_gpu_if_none_is_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, [H200, H200, H200], current=1)
    assert indices("sm_80") == [1]


def test_the_current_gpu_in_a_distributed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on every GPU in every process would take memory from all of them."""
    Gpus(monkeypatch, [H200] * 8, current=5)
    assert indices("sm_90a") == [*range(8)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert indices("sm_90a") == [5]
    assert local_target() == "sm_90a"


def test_amd_targets_are_named_by_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, [A100, A100])
    architectures = ["gfx942:sramecc+:xnack-", "gfx90a:sramecc+:xnack-"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=architectures[index])
    )
    assert local_target() == "gfx942"
    assert indices("gfx942") == [0]


def test_build_loads_cuda_kernels_on_them(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    Gpus(monkeypatch, [H200, A100, H200])
    mtagen.build(SPEC.kernel, SPEC.head_dim, backend="cuda")
    assert list(module.LOADED.values()) == len(module.SOURCES) * [{0: "sm_90a", 2: "sm_90a"}]
    # A call on the other GPU loads its kernels then, which this one cannot run.
    with pytest.raises(BackendError, match=r"target: got 'sm_90a'; the GPU has compute capability 8\.0"):
        module.load("forward", torch.device("cuda", 1))


def test_build_refuses_a_target_that_no_gpu_runs(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    Gpus(monkeypatch, [A100, L40S])
    with pytest.raises(BackendError, match=r"target: got 'sm_90a'; the GPU has compute capability 8\.0"):
        mtagen.build(SPEC.kernel, SPEC.head_dim, backend="cuda", target="sm_90a")


def test_build_launches_triton_kernels_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, [L40S, H200, L40S], current=2)
    mtagen.build(SPEC.kernel, SPEC.head_dim, backend="triton")
    assert gpus.exercised == [0, 0, 0, 2, 2, 2]  # pass by pass
    assert gpus.current == 2
    assert not gpus.compiled


def test_gpus_without_a_row_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get portable kernels, each compiled for its own architecture."""
    Gpus(monkeypatch, [B200, A100, (11, 0)])
    module = launcher(plan(SPEC, local_target(), "cuda"), monkeypatch)
    mtagen.build(SPEC.kernel, SPEC.head_dim, backend="cuda")
    assert list(module.LOADED.values()) == len(module.SOURCES) * [{0: "sm_100", 1: "sm_80", 2: "sm_110"}]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_calls_on_another_gpu_load_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = mtagen.build((4, 5), 32, backend=backend)  # which no other test builds
    sources, kernels = render(op.plan), []
    if backend == "cuda":
        module = runtime.load_host(op.plan, sources, "forward")
        assert all(1 in loaded for loaded in module.LOADED.values())
        monkeypatch.setattr(module, "load_kernels", None)
    else:
        kernels = [launch.kernel for launch in offline.launches(op.plan)]

    def compiled() -> list[int]:
        return [len(kernel.device_caches[1][0]) for kernel in kernels]

    before = compiled()
    assert all(before)
    q, k, v = torch.randn(3, 1, 2, 300, 32, device="cuda:1", dtype=torch.bfloat16).requires_grad_().unbind()
    weight = torch.randn(2, 4, 5, device="cuda:1")
    op(q, k, v, weight).float().square().sum().backward()
    with torch.no_grad():
        op.decode(q[:, :, -4:], k, v, weight)
    torch.cuda.synchronize(1)
    assert compiled() == before
