"""Programs of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def torchrun(ranks: int, *arguments: Any, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program by torchrun in so many processes, from the repository's root or another folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "cwd": folder}
    return subprocess.run([*launcher, *map(str, arguments)], **options, env=os.environ | {"PYTHONPATH": paths})
