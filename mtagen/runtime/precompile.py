"""Triton kernels compiled by several processes at once, which leave them in Triton's own cache.

Tuning compiles hundreds of kernels, which threads would make wait for each other: Triton turns Python into IR, a sixth
of the time, under the interpreter's lock. The processes are programs of their own (``python -m
mtagen.runtime.precompile``), for :mod:`multiprocessing` would run the user's script again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from ..codegen import render
from ..planner import Plan
from .load import load_host


def precompile(jobs: Sequence[tuple[Plan, str]], processes: int) -> None:
    """Compile the kernels of the given passes of plans.

    A kernel that does not compile is passed over here: its first use says why.

    Raises:
        subprocess.CalledProcessError: a process died.
    """
    shares = [share for i in range(processes) if (share := jobs[i::processes])]
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        list(pool.map(_run, shares))


def _run(share: Sequence[tuple[Plan, str]]) -> None:
    work = json.dumps([(plan.to_dict(), pass_name) for plan, pass_name in share])
    subprocess.run([sys.executable, "-m", __name__], input=work, text=True, check=True, stdout=subprocess.DEVNULL)


def _main() -> None:
    from .launches import exercise  # which needs triton

    for fields, pass_name in json.load(sys.stdin):
        plan = Plan.from_dict(fields)
        with suppress(Exception):
            exercise(plan, load_host(plan, render(plan), pass_name), torch.device("cuda"), pass_name)
    torch.cuda.synchronize()


if __name__ == "__main__":
    _main()
