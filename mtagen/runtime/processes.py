"""Python processes that mtagen starts to run jobs in parallel. They import nothing from the current
folder.

:mod:`multiprocessing` is not used: it would run the user's script again, and its processes look for
modules in the current folder first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1] / "__init__.py"

# The program of `python -c`, which puts "", the current folder, before sys.path and has imported nothing from it yet.
# The switch -P and PYTHONSAFEPATH, which leave "" out, came with Python 3.11. The package is the one that the parent
# process has imported, even if it was found in the current folder.
_START = """
import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("mtagen", sys.argv[1])
sys.modules["mtagen"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["mtagen"])
from mtagen.runtime.processes import serve
serve(*sys.argv[2:])
"""


def run_jobs(
    work: Callable[[Any], None],
    jobs: Iterable[Any],
    processes: int,
    done: Callable[[Any, str | None], None] = lambda job, error: None,
) -> None:
    """Run jobs in parallel processes, each of which takes the next job when it is ready.

    Args:
        work: runs one job; a function of a module of mtagen.
        jobs: its arguments, JSON-able values.
        processes: the largest number of processes.
        done: called, in some thread, after each job: with the job, and the first line of the error
            that ``work`` raised, or None.

    Raises:
        subprocess.CalledProcessError: a process died. Its last job is not done; the other processes
            did the rest.
    """
    waiting = deque(jobs)
    switches = ["-I"] if sys.flags.isolated else []
    command = [sys.executable, *switches, "-c", _START, str(_PACKAGE), work.__module__, work.__name__]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # for processes that these processes start

    def run_process() -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        with suppress(BrokenPipeError, EOFError), process:  # these errors mean that the process died
            assert process.stdin
            assert process.stdout
            while waiting:
                try:
                    job = waiting.popleft()
                except IndexError:  # another thread took the last one
                    break
                print(json.dumps(job), file=process.stdin, flush=True)
                if not (answer := process.stdout.readline()):
                    raise EOFError
                done(job, json.loads(answer))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    count = min(processes, len(waiting))
    with ThreadPoolExecutor(max(1, count)) as pool:
        futures = [pool.submit(run_process) for _ in range(count)]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            waiting.clear()
            raise


def serve(module: str, name: str) -> None:
    """Run the job on each line of stdin, and answer with a line on stdout: see :func:`run_jobs`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print to stderr, so that stdout has answers only
    work = getattr(import_module(module), name)
    with suppress(KeyboardInterrupt):  # the parent process gets the interrupt, too
        for line in sys.stdin:
            error = None
            try:
                work(json.loads(line))
            except Exception as raised:
                error = next(iter(str(raised).splitlines()), type(raised).__name__)
            print(json.dumps(error), file=answers, flush=True)
