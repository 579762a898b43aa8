"""Runs ``interpreter/`` in processes that chose Triton's interpreter before they imported triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import needs_compiler

FOLDER = Path(__file__).parent / "interpreter"
NEED_A_COMPILER = ("test_cuda_strip.py", "test_dynamic.py", "test_hidden_cuda_strip.py")
FILES = [
    pytest.param(path.name, marks=[needs_compiler] if path.name in NEED_A_COMPILER else [])
    for path in sorted(FOLDER.glob("test_*.py"))
]


@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--basetemp={folder.parent / file}",  # else workers find emulated kernels of other sessions beside theirs
        str(FOLDER / file),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout[-8000:])
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout)
    assert not re.search(r"\d+ skipped", run.stdout)
