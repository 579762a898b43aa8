"""Runs ``interpreter/`` in processes that chose Triton's interpreter before they imported triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import needs_compiler
from swept import SWEPT

FOLDER = Path(__file__).parent / "interpreter"
NEED_A_COMPILER = ("test_cuda_strip.py", "test_dynamic.py", "test_hidden_cuda_strip.py")
NAMES = [path.name for path in sorted(FOLDER.glob("test_*.py"))]


def marks(file: str) -> list[pytest.MarkDecorator]:
    return [needs_compiler] if file in NEED_A_COMPILER else []


@pytest.mark.parametrize("file", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_in_the_interpreter(file: str, folder: Path) -> None:
    run(file, folder, "not gpu and not sweep")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "file", [pytest.param(name, marks=marks(name)) for name in NAMES if f"interpreter/{name}" in SWEPT]
)
def test_swept(file: str, folder: Path) -> None:
    """The tests that take most of the time."""
    run(file, folder, "sweep")


def run(file: str, folder: Path, which: str) -> None:
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
        "-m",
        which,
        str(FOLDER / file),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(ended.stdout[-8000:])
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert re.search(r"\d+ passed", ended.stdout)
    assert not re.search(r"\d+ skipped", ended.stdout)
