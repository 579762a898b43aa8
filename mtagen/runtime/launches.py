"""The launches of a plan's Triton module in a small call of each pass: to run, compile or inspect
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ..dtypes import ARGUMENT_DTYPES, TORCH_DTYPES
from ..planner.passes import passes_of
from ..planner.plan import Plan
from ..spec import INTEGERS, MAX_NEW_TOKENS, Argument
from .loaded import without_recipes

_SPLIT_KEYS = 128  # keys of a decode step that is split in two, because the sum of parts is a kernel, too


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as the host code requested it."""

    kernel: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Launch the kernel (again)."""
        self.kernel[self.grid](*self.args, **self.options)


@contextmanager
def recorded(module: ModuleType, *, run: bool = True) -> Iterator[list[Launch]]:
    """Collect every launch of ``module`` inside the block; with ``run=False`` nothing is launched.

    Launches from other threads, which may call an op of the same module at the same time, run and
    are not collected.
    """
    launches: list[Launch] = []
    thread = get_ident()

    class Recorder:
        def __init__(self, kernel: JITFunction) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                requested, is_mine = Launch(self.kernel, grid, args, options), get_ident() == thread
                if is_mine:
                    launches.append(requested)
                if run or not is_mine:
                    requested.run()

            return launch

    jitted = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    kernels = {name: value for name, value in jitted.items() if not name.startswith("_")}  # they call the others
    vars(module).update({name: Recorder(kernel) for name, kernel in kernels.items()})
    try:
        with without_recipes(module):
            yield launches
    finally:
        vars(module).update(kernels)


def dry_run(
    plan: Plan, hosts: Mapping[str, ModuleType], device: torch.device, tables: ModuleType | None = None
) -> list[Launch]:
    """Return the launches of a small call of each pass, and of its tables, without launching.

    Args:
        plan: the plan.
        hosts: the modules of passes.
        device: the device of the calls.
        tables: the module that computes the tables of the mask, if there is one.
    """
    launches: list[Launch] = []
    for pass_name, module in hosts.items():
        with recorded(module, run=False) as pass_launches:
            exercise(plan, module, device, pass_name)
        launches += pass_launches
    if tables:
        with recorded(tables, run=False) as launches_of_tables:
            exercise_tables(plan, tables, device)
        launches += launches_of_tables
    return launches


def compile_launches(
    plan: Plan, hosts: Mapping[str, ModuleType], device: torch.device, tables: ModuleType | None = None
) -> None:
    """Compile the kernels that :func:`exercise` and :func:`exercise_tables` launch on the current device, several at
    once.

    A kernel that does not compile is skipped here: its launch says why.
    """
    launches = dry_run(plan, hosts, device, tables)

    def compile_all() -> None:
        # MLIR's passes and ptxas, five sixths of the time, release the interpreter lock.
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for launch in launches:
                launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)

    Context().run(compile_all)  # not in the caller's context, which may be in such a mode: Triton refuses a second one


def exercise(plan: Plan, module: ModuleType, device: torch.device, pass_name: str) -> None:
    """Call a pass of the plan once or more, so that each of its kernels is launched;

    ``module`` has its function.
    """
    spec = plan.spec
    heads = 2 * math.lcm(*spec.mixed.values())
    sizes = {"B": 1, "documents": 1, "H": heads, "Hkv": heads}
    sizes |= dict.fromkeys(("Nq", "Nk", "total_q", "total_k"), spec.cq)
    if pass_name == "decode":
        sizes["Nk"] = _SPLIT_KEYS
    dtypes = ARGUMENT_DTYPES | {"q": TORCH_DTYPES[spec.dtype]}

    def zeros(argument: Argument, **others: int) -> Tensor:
        shape = argument.extents(sizes | others)
        return torch.zeros(shape, dtype=dtypes[argument.dtypes[0]], device=device)

    q, k, v = (zeros(argument) for argument in spec.arguments[:3])
    weights = [zeros(argument) for argument in spec.weight_arguments.values()]
    weights = weights or [torch.zeros(heads, 1, 1, device=device)]  # plain attention is a convolution by a single tap
    learned = [argument for argument in spec.learned_arguments if argument.name not in spec.mask_parameters]
    shared, weights = weights, [*weights, *map(zeros, learned)]
    tables = (*spec.tables(pass_name), *spec.checked_arguments)
    others: list[Any] = []  # arguments after the scale
    if spec.packed:
        cu_seq = torch.tensor([0, spec.cq], dtype=torch.int32, device=device)
        others += [cu_seq, cu_seq, spec.cq, spec.cq]
        if spec.page_size:
            k, v = (x.new_zeros(1, heads, spec.page_size, x.shape[-1]) for x in (k, v))
            others.append(torch.zeros(1, 1, dtype=torch.int32, device=device))
    if spec.dropout:
        others += [torch.zeros(2, dtype=torch.int64, device=device), 0.5]
    out, lse = torch.zeros_like(v), torch.zeros(heads, spec.cq, device=device)
    lse = lse if spec.packed else lse.unsqueeze(0)
    if pass_name == "forward":
        module.forward(q, k, v, *weights, *map(zeros, tables), 1.0, *others)
    if pass_name == "backward":
        kept = out.new_zeros(*out.shape[:-1], plan.unmixed_columns or out.shape[-1])
        module.backward(out, lse, q, k, v, *weights, *map(zeros, tables), kept, lse, 1.0, *others)
    if pass_name != "decode":
        return
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    caches, pages, all_lengths = [k, v], [], [None, lengths]
    if spec.page_size:
        caches = [zeros(argument, Nk=spec.page_size) for argument in spec.arguments[1:3]]
        block_table = torch.zeros(1, -(-_SPLIT_KEYS // spec.page_size), dtype=torch.int32, device=device)
        pages, all_lengths = [block_table, _SPLIT_KEYS], [lengths]
    for new_tokens in (1, MAX_NEW_TOKENS):
        tail = spec.context + new_tokens
        q_tail = zeros(spec.decode_arguments[0], Nq=tail)
        weights = [*shared, *(zeros(argument, Nq=tail) for argument in learned)]
        for cache_seqlens in all_lengths:
            of_step = [zeros(table, Nq=q_tail.shape[2]) for table in tables]
            module.decode(q_tail, *caches, *weights, *of_step, 1.0, cache_seqlens, 2, *pages)


def exercise_tables(plan: Plan, module: ModuleType, device: torch.device) -> None:
    """Compute the tables of the plan's mask for small calls, with parameters of each dtype that they may have."""
    spec = plan.spec
    q = torch.zeros((1, 1, 16) if spec.packed else (1, 1, 1, 16), dtype=TORCH_DTYPES[spec.dtype], device=device)
    sizes = dict.fromkeys(("B", "documents", "Nk", "total_k"), 1)
    read = [argument for argument in spec.learned_arguments if argument.name in spec.table_parameters]
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    cu_seq = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for dtype in INTEGERS if read else INTEGERS[:1]:
        dtypes = [dtype if dtype in argument.dtypes else argument.dtypes[0] for argument in read]
        parameters = [
            torch.zeros(argument.extents(sizes), dtype=ARGUMENT_DTYPES[of], device=device)
            for argument, of in zip(read, dtypes, strict=True)
        ]
        for pass_name in passes_of(spec):
            if pass_name == "decode":
                module.decode_tables(q, *parameters, lengths, 1)
            else:
                boundaries = [cu_seq, cu_seq] if spec.packed else []
                getattr(module, f"{pass_name}_tables")(q, *parameters, *boundaries, 1)
