"""Compilation of Triton kernels in several processes at once, into Triton's own cache.

Tuning compiles hundreds of kernels. Threads would wait for each other: Triton translates Python to
IR, a sixth of the time, under the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..codegen import render
from ..planner import Plan
from .load import load_host
from .processes import run_jobs


def precompile(jobs: Sequence[tuple[Plan, str]], processes: int) -> None:
    """Compile the kernels of the given passes of plans.

    A kernel that does not compile is skipped here: its first use says why.

    Raises:
        subprocess.CalledProcessError: a process died.
    """
    run_jobs(_compile, [(plan.to_dict(), pass_name) for plan, pass_name in jobs], processes)


def _compile(job: tuple[Mapping[str, Any], str]) -> None:
    from .launches import exercise  # needs triton

    fields, pass_name = job
    plan = Plan.from_dict(fields)
    exercise(plan, load_host(plan, render(plan), pass_name), torch.device("cuda"), pass_name)
    torch.cuda.synchronize()
