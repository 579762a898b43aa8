"""Processes that are killed at each moment of their work on the disk, and started again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}  # events of Python that change a folder


def resumed_after_kills(function: Callable[[Path], None], root: Path, step: int = 1, timeout: float = 300) -> int:
    """Run ``function(root / "whole")``, and ``function(root / str(moment))`` twice for each moment of such a run.

    The first of both is killed at the moment, and the second must come to its end. Moments are those before a process
    changes a file or a folder below the argument, and before it waits until a file is on the disk. A file that was
    about to be written anew is empty after the kill, as if it came a little later. A file that was waited for lacks its
    last bytes, as if the kill came a little sooner.

    Args:
        function: of a module.
        root: a folder.
        step: from moment to moment.
        timeout: seconds for all of this.

    Returns:
        The number of moments of a run.
    """
    context = multiprocessing.get_context("spawn")  # without the threads of the process that tests
    process = context.Process(target=_serve, args=(function, root, step))
    process.start()
    process.join(timeout)
    process.kill()
    assert process.exitcode == 0, process.exitcode
    return max(int(path.name) for path in root.iterdir() if path.name.isdecimal()) + 1 - step


def _serve(function: Callable[[Path], None], root: Path, step: int) -> None:
    torch.set_num_threads(1)
    function(root / "whole")  # what this compiles and imports is there in each fork
    for moment in count(1, step):
        folder = root / str(moment)
        first = _fork(_die_at, moment, folder, function)
        assert first in (0, -signal.SIGKILL), f"moment {moment}: {first}"
        if first == 0:
            break
        assert _fork(function, folder) == 0, f"moment {moment}: cannot be resumed"


def _fork(function: Callable[..., None], *arguments: Any) -> int:
    """Call a function in a fork of this process. Returns its exit code, or the negative number of its signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _die_at(moment: int, folder: Path, function: Callable[[Path], None]) -> None:
    moments, wait = 0, os.fsync

    def comes() -> bool:
        nonlocal moments
        moments += 1
        return moments == moment

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event not in CHANGES or (event == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if isinstance(values[0], (str, os.PathLike)) and Path(values[0]).is_relative_to(folder) and comes():
            if event == "open" and values[2] & os.O_TRUNC and Path(values[0]).exists():
                os.truncate(values[0], 0)
            die()

    def fsync(descriptor: int) -> None:
        if comes():
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - 5))
            die()
        wait(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync
    function(folder)
