"""Plan and sources -> callable passes: keep in the cache, compile, load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..codegen import Sources
from ..errors import BackendError, explain
from ..planner.choice import GENERATED, Backend
from ..planner.plan import Plan
from ..planner.targets import get_target
from . import documents
from .devices import devices_for
from .disk_cache import Cache, cache_key
from .loader import load_module
from .nvrtc import cached_cubin, cuda_is_installed, toolchain
from .triton_package import require_triton, triton_is_installed, triton_version


@dataclass(frozen=True)
class Passes:
    """The host functions of a plan, from any backend.

    A pass that the spec does not have is None. Plain attention takes None for the weight. After the scale, functions
    for packed documents take cu_seq_q, cu_seq_k, max_q and max_k; functions with dropout then take the seed and p.

    Attributes:
        forward: (q, k, v, weight, scale) -> (out, lse), and unmixed if there are ``unmixed_columns``.
        backward: (grad_out, grad_lse, q, k, v, weight, out, lse, scale, deterministic=bool) -> (dq, dk, dv, dweight).
            None stands for a grad_lse of zeros. If there are ``unmixed_columns``, unmixed takes the place of out.
        decode: (q_tail, k_cache, v_cache, weight, scale, cache_seqlens, num_splits) -> (out, lse). With pages it then
            takes block_table and max_k.
        reads_pages: whether forward reads keys and values of packed documents from pages; it then takes block_table
            after max_k.
        tables: functions that compute the tables of the mask on the device, by pass; without them PyTorch's operations
            do.
        skips_earlier_rows: whether forward does not read queries before a document's start, if hidden scores are
            zeros before the convolution.
        unmixed_columns: columns of unmixed: (B, H, Nq, columns), the outputs of each head's probabilities with the
            values of each head of its group, side by side. 0 if forward does not return it.
    """

    forward: Callable[..., tuple[Tensor, ...]] | None = None
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    decode: Callable[..., tuple[Tensor, Tensor]] | None = None
    reads_pages: bool = False
    skips_earlier_rows: bool = False
    tables: Mapping[str, Callable[..., Sequence[Tensor]]] = field(default_factory=dict)
    unmixed_columns: int = 0


def available_backends() -> tuple[Backend, ...]:
    """Return the backends of generated kernels whose packages are installed."""
    installed = {"cuda": cuda_is_installed(), "triton": triton_is_installed()}
    return tuple(backend for backend in GENERATED if installed[backend])


def plan_key(plan: Plan, sources: Sources) -> str:
    """Return the hash of a plan, its sources and the packages that run them: identity of an op and
    its cache entry.
    """
    triton = triton_version() if plan.triton or sources.tables else None
    return cache_key(sources.digest, plan.to_dict(), torch.__version__, triton)


def load(plan: Plan, sources: Sources) -> Passes:
    """Return the passes of a plan of generated kernels. Nothing is compiled yet: see
    :func:`compile_kernels`.

    Raises:
        BackendError: a pass has Triton kernels, and the triton package is missing.
    """
    hosts = {name: getattr(load_host(plan, sources, name), name) for name in sources.hosts}
    reads_pages = plan.spec.packed and plan.spec.page_size is not None
    module = load_tables(plan, sources)
    return Passes(
        **hosts,
        reads_pages=reads_pages,
        skips_earlier_rows=reads_pages and plan["forward"].lowering == "tile",
        tables={} if module is None else {name: getattr(module, f"{name}_tables") for name in sources.hosts},
        unmixed_columns=plan.unmixed_columns,
    )


def load_host(plan: Plan, sources: Sources, pass_name: str) -> ModuleType:
    """Return the module with a pass's host function, from the rendered text.

    The cache keeps the text where tracebacks and debuggers find it, and the cubins that the module loads.

    Raises:
        BackendError: the pass has Triton kernels, and the triton package is missing.
    """
    if pass_name in plan.triton:
        require_triton()
    module = _load_file(plan, sources, sources.hosts[pass_name])

    def compile_source(source: Path, target: str, index: int) -> bytes:
        arch = arch_for(target, torch.cuda.get_device_capability(index))
        return cached_cubin(sources.files[source.name], arch, source.stem)

    if plan.cuda:
        module.compile_source = compile_source  # type: ignore[attr-defined]
    documents.install(module)
    return module


def load_tables(plan: Plan, sources: Sources) -> ModuleType | None:
    """Return the module that computes the tables of the plan's mask.

    None if no kernel reads tables, or without the triton package: a plan of CUDA kernels needs none.
    """
    return _load_file(plan, sources, sources.tables) if sources.tables and triton_version() else None


def _load_file(plan: Plan, sources: Sources, file: str) -> ModuleType:
    files = {name: content.encode() for name, content in sources.files.items()}
    metadata = {"plan": plan.to_dict()}
    entry = Cache().get_or_build(plan.name, plan.target, plan_key(plan, sources), dict, metadata, sources=files)
    return load_module(entry.path / file, files[file])


def compile_kernels(plan: Plan, sources: Sources) -> None:
    """Compile and load every kernel on the plan's GPUs; without a GPU, compile CUDA kernels for the
    plan's target.

    Lengths, strides and head counts are run-time arguments, so nothing is left to compile in a later call.

    Raises:
        BackendError: CUDA's compiler is missing, or cannot compile for a GPU; the driver refuses a kernel.
    """
    devices, arch = devices_for(plan.target), get_target(plan.target).sm
    if plan.cuda:
        toolchain()  # it imports cuda.core; threads that import cuda.core at once may find only a part of it
    hosts = {pass_name: load_host(plan, sources, pass_name) for pass_name in sources.hosts} if devices else {}
    with ThreadPoolExecutor() as pool:  # NVRTC releases the interpreter lock
        if not devices:
            list(pool.map(lambda name: cached_cubin(sources.kernels[name], arch, plan.cuda[name].name), plan.cuda))
        for device in devices:  # in turn: equal GPUs share the cubins that are compiled for the first
            for module in dict.fromkeys(hosts.values()):  # passes of one lowering share a module
                list(pool.map(partial(_load, module, device), getattr(module, "SOURCES", ())))
    tables = load_tables(plan, sources) if devices else None
    schedules = plan.spec.packed and triton_version() is not None
    for device in devices if plan.triton or tables or schedules else ():
        from .launches import compile_launches, exercise, exercise_tables  # which need triton

        with torch.cuda.device(device):  # Triton launches on the current device
            compile_launches(plan, {pass_name: hosts[pass_name] for pass_name in plan.triton}, device, tables)
            for pass_name in plan.triton:
                exercise(plan, hosts[pass_name], device, pass_name)
            if tables:
                exercise_tables(plan, tables, device)
            if schedules:
                documents.compile_kernel(device)
            torch.cuda.synchronize()


def _load(module: ModuleType, device: torch.device, pass_name: str) -> None:
    try:
        module.load(pass_name, device)
    except BackendError:
        raise
    except RuntimeError as error:  # from emitted code, which has no error classes of mtagen's
        raise BackendError(f"{module.__name__}: {error}") from error


def arch_for(target: str, capability: tuple[int, int]) -> str:
    """Return the architecture for which sources of a target are compiled on a GPU: the GPU's own.

    A cubin runs only on the architecture that it was compiled for.

    Raises:
        BackendError: the GPU does not run the target's instructions.
    """
    planned, here = get_target(target), 10 * capability[0] + capability[1]
    if here == planned.arch:
        return planned.sm
    if planned.is_specific or here < int(planned.arch):
        major, minor = capability
        rule = f"the GPU has compute capability {major}.{minor}, which cannot run this target's instructions"
        raise BackendError(explain("target", target, rule, "the target of this GPU, or backend='triton'"))
    return f"sm_{here}"
