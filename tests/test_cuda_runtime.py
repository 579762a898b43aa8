"""What runs CUDA kernels: NVRTC without a GPU, cubins in the cache, arguments as a kernel gets them, launches."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import cuda.pathfinder
import pytest
import torch
from cuda.bindings import driver
from torch import Tensor

import mtagen
from mtagen import BackendError, PlanError, Spec, plan
from mtagen.codegen import render
from mtagen.codegen.host import codes
from mtagen.planner.kernel import Argument, numbers, reads, strides, writes
from mtagen.planner.kernel import Kernel as PlannedKernel
from mtagen.runtime import load as runtime
from mtagen.runtime import nvrtc
from mtagen.runtime.disk_cache import Cache
from mtagen.runtime.load import arch_for, compile_kernels
from mtagen.runtime.nvrtc import cached_cubin, compile_cubin, cuda_is_installed, toolchain
from mtagen.runtime.offline import usage_of_cubins
from mtagen.templates.host.launcher import Kernel, checked, compile_source, load_kernels

# y[h, i] = factor * x[h, i], in a kernel that takes an argument of every type and much shared memory.
SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void __launch_bounds__(128) scaled(
    const float* x, float factor, long long x_stride_b, long long x_stride_h, long long x_stride_n, int n, float* y) {
  extern __shared__ float staged[];
  staged[50000 + threadIdx.x] = __half2float(__float2half(factor));
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) y[blockIdx.y * n + i] = staged[50000 + threadIdx.x] * x[blockIdx.y * x_stride_h + i * x_stride_n];
}

extern "C" __global__ void idle() {}
"""
ARGUMENTS = (
    *reads("float", "x"),
    *numbers("float", "factor"),
    *strides("x"),
    *numbers("int", "n"),
    *writes("float", "y"),
)
SHARED, REGISTERS = 220 * 1024, 32
FACTS = {"main": ("scaled", 128, SHARED, "PfqqqiP"), "idle": ("idle", 32, 0, "")}
CONTEXT, MODULE, FUNCTION = "a context", "a module", 7


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    return Cache()


# The compiler.


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_compiles_without_a_gpu(arch: str) -> None:
    cubin = compile_cubin(SOURCE, arch)
    usage = usage_of_cubins(cubin)
    assert set(usage) == {"scaled", "idle"}
    assert 0 < usage["scaled"].registers <= REGISTERS
    assert usage["scaled"].stack == 0
    opcodes = usage["scaled"].opcodes
    assert opcodes["FMUL"] == 1
    assert opcodes["STG.E"] == 1
    assert not usage["idle"].opcodes["FMUL"]


def test_compile_errors_show_the_log() -> None:
    with pytest.raises(BackendError, match=r'(?s)mta_bad\.cu does not compile for sm_80:.*"nonsense" is undefined'):
        compile_cubin('extern "C" __global__ void bad() { nonsense(); }', "sm_80", "mta_bad")


def test_cubins_are_cached(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    cubin = cached_cubin(SOURCE, "sm_80", "mta_scaled")
    (entry,) = cache.entries()
    assert (entry.name, entry.arch, set(entry.files)) == ("mta_scaled", "sm_80", {"mta_scaled.cu", "mta_scaled.cubin"})
    assert entry.files["mta_scaled.cu"].decode() == SOURCE
    with monkeypatch.context() as without:
        without.setattr(nvrtc, "compile_cubin", None)
        assert cached_cubin(SOURCE, "sm_80", "mta_scaled") == cubin


@pytest.mark.parametrize("change", ["source", "arch", "nvrtc", "headers"])
def test_what_makes_another_cubin(change: str, monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: b"")
    made = {"source": SOURCE, "arch": "sm_80"}
    tools = vars(toolchain())
    cached_cubin(**made, name="mta_scaled")
    if change in made:
        made[change] = "sm_89" if change == "arch" else SOURCE + "\n"
    else:
        monkeypatch.setattr(nvrtc, "toolchain", lambda: nvrtc.Toolchain(**tools | {change: "another"}))
    cached_cubin(**made, name="mta_scaled")
    assert len({entry.key for entry in cache.entries()}) == 2


# A machine that lacks something.


@pytest.fixture
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "headers":
        monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda _: None)
    else:
        monkeypatch.setitem(sys.modules, request.param, None)
    toolchain.cache_clear()
    yield request.param
    toolchain.cache_clear()


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings", "headers"], indirect=True)
def test_says_how_to_install(missing: str) -> None:
    with pytest.raises(BackendError, match=rf"{missing} .*missing; legal: pip install 'mtagen\[cuda\]'"):
        compile_cubin(SOURCE, "sm_80")
    assert not cuda_is_installed()
    with pytest.raises(BackendError, match=r"pip install 'mtagen\[cuda\]'"):
        mtagen.build((6, 11), 64, backend="cuda", target="sm_90a")


@pytest.mark.parametrize("missing", ["cuda.core"], indirect=True)
def test_auto_says_that_cuda_is_not_installed(missing: str) -> None:
    op = mtagen.build((6, 11), 64, target="gfx942" if torch.version.hip else "sm_90a", dtype="bf16")
    assert op.plan.backend == "triton"
    assert "pip install 'mtagen[cuda]'" in op.plan.reason


# Architectures.


@pytest.mark.parametrize(
    ("target", "capability", "arch"),
    [
        ("sm_80", (8, 0), "sm_80"),
        ("sm_80", (8, 6), "sm_86"),
        ("sm_80", (9, 0), "sm_90"),
        ("sm_80", (10, 0), "sm_100"),
        ("sm_120", (12, 0), "sm_120"),
        ("sm_120", (12, 1), "sm_121"),
        ("sm_89", (8, 9), "sm_89"),
        ("sm_90a", (9, 0), "sm_90a"),
    ],
)
def test_architecture_of_a_gpu(target: str, capability: tuple[int, int], arch: str) -> None:
    assert arch_for(target, capability) == arch


@pytest.mark.parametrize(
    ("target", "capability"),
    [("sm_90a", (8, 9)), ("sm_90a", (10, 0)), ("sm_90a", (12, 0)), ("sm_89", (8, 0)), ("sm_120", (10, 0))],
)
def test_architectures_that_do_not_run(target: str, capability: tuple[int, int]) -> None:
    with pytest.raises(BackendError, match=f"target: got '{target}'; .*capability {capability[0]}.{capability[1]}"):
        arch_for(target, capability)


# Launches, without a GPU: what the driver is given.


class Driver:
    """Stands in for the driver, which has kernels of every name.

    Attributes:
        types: of the next launch's arguments.
        statuses: what launches return in turn, then success.
        launches: (arguments of cuLaunchKernel but the last two, the kernel's own arguments).
        contexts: what was made the thread's context.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.types: list[type[ctypes._SimpleCData]] = []
        self.statuses: list[driver.CUresult] = []
        self.launches: list[tuple[tuple[int, ...], list[float]]] = []
        self.contexts: list[str] = []
        self.asked: list[tuple[object, ...]] = []
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
        patch.setattr(driver, "cuModuleGetFunction", self._function)
        patch.setattr(driver, "cuFuncSetAttribute", self._attribute)
        patch.setattr(driver, "cuLaunchKernel", self._launch)
        patch.setattr(driver, "cuCtxSetCurrent", self.contexts.append)
        patch.setattr(driver, "cuGetErrorString", lambda status: (0, f"{status.name} in words".encode()))

    def _function(self, module: str, name: bytes) -> tuple[int, int]:
        self.asked.append((module, name))
        return 0, FUNCTION

    def _attribute(self, function: int, attribute: driver.CUfunction_attribute, value: int) -> tuple[int]:
        self.asked.append((function, attribute.name, value))
        return (0,)

    def _launch(self, *arguments: int) -> tuple[driver.CUresult]:
        pointers = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))
        values = [kind.from_address(pointers[i]).value for i, kind in enumerate(self.types)]
        self.launches.append((arguments[:9], values))
        return (self.statuses.pop(0) if self.statuses else driver.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def loaded(kinds: str, name: str = "any", device: int = 2) -> Kernel:
    return Kernel(name, 96, 4096, kinds, MODULE, CONTEXT, device)


def test_types_of_arguments() -> None:
    kernel = PlannedKernel("main", "scaled", ARGUMENTS, (), 128, SHARED, REGISTERS)
    assert codes(kernel) == FACTS["main"][3]
    with pytest.raises(KeyError):
        codes(PlannedKernel("main", "any", (Argument("x", "double"),), (), 32, 0, 32))


def test_arguments_as_the_driver_gets_them(gpu: Driver) -> None:
    kinds = "iPfiqfP"
    types = {"i": ctypes.c_int, "P": ctypes.c_uint64, "f": ctypes.c_float, "q": ctypes.c_int64}
    values = (-3, 2**63 + 5, 0.375, 2**31 - 1, -(2**40), -1e-30, 17)
    gpu.types = [types[kind] for kind in kinds]
    kernel = loaded(kinds)
    assert gpu.asked == [(MODULE, b"any"), (FUNCTION, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 4096)]
    kernel((5, 4), *values)
    kernel((6,), *values)
    (how, got), (again, _) = gpu.launches
    assert how == (FUNCTION, 5, 4, 1, 96, 1, 1, 4096, 1002)
    assert again == (FUNCTION, 6, 1, 1, 96, 1, 1, 4096, 1002)
    assert got == [*values[:5], ctypes.c_float(-1e-30).value, 17]
    assert "any on cuda:2" in repr(kernel)


def test_wrong_arguments_are_not_launched(gpu: Driver) -> None:
    kernel = loaded(FACTS["main"][3])
    for arguments in ((), (0,) * 8, (0, 0.0, 0, 0, 0, 2**31, 0), (None, 0.0, 0, 0, 0, 1, 0)):
        with pytest.raises(Exception, match=r"pack_into|format|required argument"):
            kernel((1, 1), *arguments)
    assert not gpu.launches


def test_a_thread_that_never_used_the_device_gets_its_context(gpu: Driver) -> None:
    gpu.statuses = [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    loaded("")((1,))
    assert gpu.contexts == [CONTEXT]
    assert len(gpu.launches) == 2


def test_a_launch_that_the_driver_refuses_raises(gpu: Driver) -> None:
    gpu.statuses = [driver.CUresult.CUDA_ERROR_INVALID_VALUE]
    message = r"the launch of any, grid \(0, 1\), failed: CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE in words"
    with pytest.raises(RuntimeError, match=message):
        loaded("")((0, 1))
    assert not gpu.contexts
    with pytest.raises(RuntimeError, match="finding any failed: CUDA_ERROR_NOT_FOUND"):
        checked((driver.CUresult.CUDA_ERROR_NOT_FOUND, 0), "finding any")
    assert checked((driver.CUresult.CUDA_SUCCESS, 5), "asking") == 5


def test_the_emitted_module_compiles_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the GPU's own architecture, unless its instructions are those of one alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {0: (9, 0), 1: (8, 6)}[index])
    source = tmp_path / "scaled.cu"
    source.write_text(SOURCE)
    for target, index, arch in (("sm_90a", 0, "sm_90a"), ("sm_80", 0, "sm_90"), ("sm_80", 1, "sm_86")):
        cubin = compile_source(source, target, index)
        assert set(usage_of_cubins(cubin)) == {"scaled", "idle"}
        assert architecture(cubin) == arch.rstrip("a")


def architecture(cubin: bytes) -> str:
    """Of the GPU that a cubin is for."""
    flags = int.from_bytes(cubin[0x30:0x34], "little")  # e_flags of an ELF header of 64 bits
    return f"sm_{flags >> 8 & 0xFF}"


def test_what_the_driver_refuses_at_build_is_an_error_of_mtagens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(Spec((2, 3), 16), "sm_90a", "cuda")
    sources = render(made)

    def refuse(name: str, device: torch.device) -> None:
        raise RuntimeError(f"loading {name} failed")

    monkeypatch.setattr(runtime, "devices_for", lambda _: [torch.device("cuda", 0)])
    monkeypatch.setattr(runtime.load_host(made, sources, "forward"), "load", refuse)
    with pytest.raises(BackendError, match=r"mta_tile_.*: loading forward failed"):
        compile_kernels(made, sources)


# Built ops, without a GPU.


def test_build_compiles_for_the_target(cache: Cache) -> None:
    op = mtagen.build((6, 11), 64, backend="cuda", target="sm_90a", dtype="bf16")
    assert op.plan.backend == "cuda"
    made = {entry.name for entry in cache.entries()}
    assert made == {op.plan.name, *(one.name for one in op.plan.cuda.values())}
    with pytest.raises(BackendError, match="device: got 'cpu'"):
        op(*(torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16) for _ in range(3)), torch.zeros(1, 6, 11))


def test_shapes_that_do_not_fit_are_refused() -> None:
    for spec in (Spec((17, 3), 64), Spec((3, 18), 64), Spec((6, 11), 64, dtype="fp32")):
        with pytest.raises(PlanError, match="cuda"):
            plan(spec, "sm_90a", "cuda")


# On a GPU.


@pytest.fixture
def scaled() -> SimpleNamespace:
    """y = 2.5 x by the test kernel, and what it is by PyTorch."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch = arch_for("sm_80", torch.cuda.get_device_capability(device))
    kernel = load_kernels(compile_cubin(SOURCE, arch), FACTS, device.index)["main"]
    x = torch.randn(3, 1000, 2, device=device)[..., 0]
    y = torch.zeros(3, 1000, device=device)

    def run() -> Tensor:
        kernel((8, 3), x.data_ptr(), 2.5, 0, *x.stride(), 1000, y.data_ptr())
        return y

    return SimpleNamespace(run=run, kernel=kernel, x=x, y=y, expected=2.5 * x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestLaunch:
    def test_on_the_current_stream(self, scaled: SimpleNamespace) -> None:
        assert torch.equal(scaled.run(), scaled.expected)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
            scaled.x.add_(1)
            scaled.run()
        stream.synchronize()
        assert torch.equal(scaled.y, 2.5 * scaled.x)

    def test_in_a_graph(self, scaled: SimpleNamespace) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scaled.run()
        scaled.y.zero_()
        graph.replay()
        assert torch.equal(scaled.y, scaled.expected)

    def test_in_a_thread_that_never_used_the_device(self, scaled: SimpleNamespace) -> None:
        thread = threading.Thread(target=scaled.run)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert torch.equal(scaled.y, scaled.expected)

    def test_from_many_threads(self, scaled: SimpleNamespace) -> None:
        outs = torch.zeros(8, 3000, device="cuda")

        def work(i: int) -> None:
            for _ in range(500):
                scaled.kernel((8, 3), scaled.x.data_ptr(), float(i), 0, *scaled.x.stride(), 1000, outs[i].data_ptr())

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        for i, out in enumerate(outs):
            assert torch.equal(out.view(3, 1000), i * scaled.x)

    def test_a_refused_launch_raises(self, scaled: SimpleNamespace) -> None:
        with pytest.raises(RuntimeError, match=r"launch of scaled, grid \(0, 1\), failed: CUDA_ERROR_INVALID_VALUE"):
            scaled.kernel((0, 1), 0, 0.0, 0, 0, 0, 0, 0)

    def test_a_broken_cubin_raises(self) -> None:
        with pytest.raises(RuntimeError, match="loading a cubin failed"):
            load_kernels(b"no cubin" * 100, FACTS, 0)


def test_the_benchmark_of_calls_runs() -> None:
    """``benchmarks/call.py``, whose figures of one burst mean little."""
    script = Path(__file__).parents[1] / "benchmarks/call.py"
    done = subprocess.run([sys.executable, script, "--bursts", "1"], capture_output=True, text=True, check=True)
    figures = re.findall(r"(forward|with gradients|backward|decode) +│ +([\d.]+)", done.stdout)
    assert [name for name, _ in figures] == ["forward", "with gradients", "backward", "decode"]
    assert all(float(us) > 0 for _, us in figures)
