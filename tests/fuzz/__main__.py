"""Tries random calls of ops, and prints those whose results are wrong, made smaller.

Run from the repository's root::

    python -m tests.fuzz --backend cpu --cases 1000 --seed 7           # these cases, on one of the backends
    python -m tests.fuzz --backend emulator --seconds 600 --seed 7     # as many as there is time for
    python -m tests.fuzz --backend cpu --seed 7 --case 42              # one of them again
    python -m tests.fuzz --case '{"backend": "cpu", ...}'              # one that was printed

Backends: ``cpu`` (PyTorch ops), ``interpreter`` (Triton's kernels), ``emulator`` (CUDA's, which a C++ compiler compiles
for the CPU) and ``gpu`` (both). Exit status: 0 if all results were right, 1 if some were wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from .case import BACKENDS, Case, draw
from .shrink import shrink

INTERPRETED = ("interpreter", "emulator")  # backends that need Triton's interpreter, which is chosen at import
Judge = Callable[[Case], "list[str] | None"]  # what is wrong with a case, a line each; None: no op has such a call


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Random calls against mtagen.reference.")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--cases", type=int, metavar="N", help="how many to try")
    parser.add_argument("--seconds", type=float, metavar="S", help="how long to try; 60 if there is no --cases")
    parser.add_argument("--seed", type=int, default=0, metavar="X", help="of all cases")
    parser.add_argument("--case", metavar="K", help="only this one: a number, or a line that was printed")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the number of the first case")
    parser.add_argument("--hidden", action=argparse.BooleanOptionalAction, default=True, help="spoil hidden numbers")
    parser.add_argument("--failures", type=int, default=1, metavar="N", help="stop after so many")
    parser.add_argument("--shrink", type=float, default=60, metavar="S", help="seconds to make a failing case smaller")
    parser.add_argument("--folder", type=Path, help="where compiled kernels are kept; default a temporary one")
    options = parser.parse_args(arguments)
    printed = Case.parse(options.case) if options.case and not options.case.isdecimal() else None
    backend = printed.backend if printed else options.backend

    def cases() -> Iterator[tuple[str, Case]]:
        """Each with the arguments that try it again."""
        if printed:
            yield f"--case '{printed}'", printed
            return
        end = time.monotonic() + (options.seconds or (float("inf") if options.cases else 60))
        numbers = itertools.count(options.first) if options.case is None else [int(options.case)]
        for index in itertools.islice(numbers, options.cases):
            if time.monotonic() > end:
                return
            case = draw(backend, options.seed, index)
            yield (
                f"--backend {backend} --seed {options.seed} --case {index}",
                replace(case, hidden=case.hidden * options.hidden),
            )

    with judging(backend, options.folder) as judge:
        return run(cases(), judge, options.failures, options.shrink)


def run(cases: Iterator[tuple[str, Case]], judge: Judge, most: int, seconds: float) -> int:
    """Try cases until so many have failed, print these, and return the exit status."""
    tried = refused = failed = 0
    for again, case in cases:
        wrong = judge(case)
        tried, refused = tried + (wrong is not None), refused + (wrong is None)
        if not wrong:
            continue
        failed += 1
        print(f"wrong: python -m tests.fuzz {again}", *wrong, sep="\n  ", flush=True)
        smaller = shrink(case, lambda case: _kinds(judge(case)), seconds)
        if smaller != case:
            print(f"smaller: python -m tests.fuzz --case '{smaller}'", *judge(smaller) or (), sep="\n  ", flush=True)
        if failed == most:
            break
    print(f"{tried} cases, {failed} wrong; {refused} more have no kernels")
    return 1 if failed else 0


def _kinds(wrong: list[str] | None) -> set[str]:
    """What lines begin with: a result's name, or that of an error."""
    return {line.partition(":")[0] for line in wrong or ()}


@contextmanager
def judging(backend: str, folder: Path | None) -> Iterator[Judge]:
    """What says what is wrong with a case of a backend.

    Args:
        backend: one of ``BACKENDS``.
        folder: where compiled kernels are kept; None: in a temporary one.
    """
    if backend in INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(Path(__file__).parents[1]))  # modules that tests share
    import torch

    from mtagen.errors import BackendError, PlanError

    from .check import Problem
    from .ops import ops_of

    torch.set_num_threads(1)  # of small tensors: threads would wait for each other
    warnings.simplefilter("ignore", RuntimeWarning)  # rows that are not aligned are copied
    device = torch.device("cuda" if backend == "gpu" else "cpu")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary, ops_of(backend, folder or Path(temporary)) as op_of:

        def judge(case: Case) -> list[str] | None:
            try:
                return Problem(case, device).failures(op_of(case))
            except (BackendError, PlanError) as error:
                return [f"refused: {error}"] if backend == "cpu" else None
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]

        yield judge


if __name__ == "__main__":
    sys.exit(main())
