"""Programs of several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def torchrun(
    ranks: int, *arguments: Any, interrupt: Callable[[], bool] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program by torchrun from the repository's root.

    Args:
        ranks: number of processes.
        arguments: of torchrun.
        interrupt: says when Ctrl-C is pressed.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [*launcher, *map(str, arguments)]
    with subprocess.Popen(command, **options, env=os.environ | {"PYTHONPATH": paths}) as process:
        try:
            deadline = time.monotonic() + 120
            while interrupt and process.poll() is None and time.monotonic() < deadline:
                if interrupt():
                    process.send_signal(signal.SIGINT)
                    break
                time.sleep(0.1)
            stdout, stderr = process.communicate(timeout=120)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
