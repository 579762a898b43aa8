"""Python processes that mtagen starts to do jobs side by side. They import nothing from the current folder.

They are programs of their own, because :mod:`multiprocessing` would run the user's script again, and because its
processes look for modules in the current folder first.
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

# For `python -c`, which puts "", the current folder, before sys.path, and has imported nothing from it yet. The switch
# -P and PYTHONSAFEPATH, which would keep it out, came with Python 3.11. The package is that of the process that starts
# this one, even if it was found in the current folder.
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
    """Do jobs in processes side by side, each of which takes the next job when it has done one.

    Args:
        work: does a job; a function of a module of mtagen.
        jobs: the arguments it is called with, JSON-able values.
        processes: how many processes at most.
        done: called, in some thread, after each job: with the job, and the first line of what ``work`` raised, if it
            raised anything.

    Raises:
        subprocess.CalledProcessError: a process died. Its last job is not done, and the others took the next ones.
    """
    waiting = deque(jobs)
    switches = ["-I"] if sys.flags.isolated else []
    command = [sys.executable, *switches, "-c", _START, str(_PACKAGE), work.__module__, work.__name__]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # for what the processes start in turn

    def employ() -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        with suppress(BrokenPipeError, EOFError), process:  # errors that say that the process died
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
        employed = [pool.submit(employ) for _ in range(count)]
        try:
            for one in employed:
                one.result()
        except KeyboardInterrupt:
            waiting.clear()
            raise


def serve(module: str, name: str) -> None:
    """Do the job on each line of stdin, and answer it with a line on stdout: see :func:`run_jobs`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    work = getattr(import_module(module), name)
    with suppress(KeyboardInterrupt):  # which the process that started this one gets, too
        for line in sys.stdin:
            error = None
            try:
                work(json.loads(line))
            except Exception as raised:
                error = next(iter(str(raised).splitlines()), type(raised).__name__)
            print(json.dumps(error), file=answers, flush=True)
