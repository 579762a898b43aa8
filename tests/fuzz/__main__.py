"""Try random calls of ops against ``mtagen.reference`` in float64, and print those that are wrong, made smaller.

Run from the repository's root::

    python -m tests.fuzz --backend cpu --cases 1000 --seed 7           # cases 0 to 999 of this seed
    python -m tests.fuzz --backend emulator --seconds 600 --seed 7     # as many cases as there is time for
    python -m tests.fuzz --backend cpu --seed 7 --case 42              # case 42 of this seed
    python -m tests.fuzz --case '{"backend": "cpu", ...}'              # a case that was printed

The backend ``cpu`` runs PyTorch ops, ``interpreter`` runs Triton's kernels in its interpreter, ``emulator`` runs CUDA's
kernels compiled by a C++ compiler, and ``gpu`` runs both on a GPU. The exit status is 1 if a result was wrong, else 0.
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
Judge = Callable[[Case], "list[str] | None"]  # lines that say what is wrong with a case; None: it has no kernels


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Random calls against mtagen.reference.")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--cases", type=int, metavar="N", help="number of cases")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after S seconds; default 60 without --cases")
    parser.add_argument("--seed", type=int, default=0, metavar="X", help="seed of all cases")
    parser.add_argument("--case", metavar="K", help="try this case only: its number, or a printed line")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first case")
    parser.add_argument(
        "--hidden",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replace hidden numbers in some of the cases",
    )
    parser.add_argument("--failures", type=int, default=1, metavar="N", help="stop after N failing cases")
    parser.add_argument(
        "--shrink", type=float, default=60, metavar="S", help="make a failing case smaller for S seconds"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep compiled kernels here, for one state of the emulator; default a temporary folder",
    )
    options = parser.parse_args(arguments)
    printed = Case.parse(options.case) if options.case and not options.case.isdecimal() else None
    backend = printed.backend if printed else options.backend

    def cases() -> Iterator[tuple[str, Case]]:
        """Yield each case with the arguments that try it again."""
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
    """Try the cases, print the failing ones, and return the exit status.

    Args:
        cases: the arguments that try a case again, and the case.
        judge: judges a case.
        most: stop after so many failing cases.
        seconds: time to make a failing case smaller.
    """
    tried = refused = failed = 0
    for again, case in cases:
        wrong = judge(case)
        tried, refused = tried + (wrong is not None), refused + (wrong is None)
        if (tried + refused) % 100 == 0:
            print(f"{tried + refused} cases were drawn", file=sys.stderr, flush=True)
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
    """Return what the lines begin with: the name of a result or of an error."""
    return {line.partition(":")[0] for line in wrong or ()}


@contextmanager
def judging(backend: str, folder: Path | None) -> Iterator[Judge]:
    """Yield the function that judges cases of a backend.

    Args:
        backend: one of ``BACKENDS``.
        folder: keeps compiled kernels; None: a temporary one.
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
