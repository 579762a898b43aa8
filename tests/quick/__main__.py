"""Run the quick tier, and list what of mtagen it does not touch: ``python -m tests.quick``.

A template is touched if it is rendered, a module if one of its functions is called, or if it has none and is imported.
Exit status: 0 if all tests passed and touched all, else 1. Recording makes the tests take longer than they do alone.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .recorder import IMPORTED, PACKAGE

ROOT = PACKAGE.parent


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments besides, and compare what it touched with what there is."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTEST_PLUGINS": "tests.quick.recorder",
            "PYTHONPATH": str(ROOT),
            "TOUCHED": folder,
        }
        command = [sys.executable, "-m", "pytest", "-m", "quick", "-n", "2", *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        touched = {line for file in Path(folder).iterdir() for line in file.read_text().splitlines()}
    missed = sorted(expected() - touched)
    print(f"not touched by the quick tier: {', '.join(missed) or 'nothing'}")
    return int(status != 0 or bool(missed))


def expected() -> set[str]:
    """What a run that touches all of mtagen records."""
    modules, templates = set(), set()
    for path in PACKAGE.rglob("*.*"):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("templates/") and path.suffix != ".pyc":
            templates.add(name)
        elif path.suffix == ".py" and path.name != "__main__.py":  # which runs in a process of its own
            modules.add(name if _has_functions(path) else name + IMPORTED)
    return modules | templates


def _has_functions(module: Path) -> bool:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
