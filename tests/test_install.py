"""Python and type checkers find an editable install, which requires no package that the machine cannot use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import ROOT

PROGRAM = """\
import mtagen

op = mtagen.build(kernel=(6, 11), head_dim=64)
reveal_type(op)
"""
GPU_ONLY = ("cuda", "nvidia", "triton")


class Installed:
    """An environment with nothing but an editable mtagen, whose clone is a folder called mtagen.

    Attributes:
        parent: the folder that contains the clone.
        python: the environment's interpreter.
        distribution: what the environment knows of mtagen.
    """

    def __init__(self, folder: Path) -> None:
        self.parent = folder / "parent"
        clone, environment = self.parent / "mtagen", folder / "environment"
        shutil.copytree(ROOT / "mtagen", clone / "mtagen", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, clone)
        venv.create(environment)
        self.python = environment / "bin/python"
        offline = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
        self.run(sys.executable, "-m", "pip", "install", *offline, "--prefix", environment, "--editable", clone)
        (packages,) = environment.glob("lib/python*/site-packages")
        (self.distribution,) = Distribution.discover(path=[str(packages)])

    def run(self, *command: str | Path) -> str:
        """Run a command in the folder that contains the clone; return what it printed."""
        run = subprocess.run(command, cwd=self.parent, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("pip")
    return Installed(tmp_path_factory.mktemp("install"))


def test_the_folder_that_contains_the_clone_does_not_hide_the_package(installed: Installed) -> None:
    found = installed.run(installed.python, "-E", "-c", "import mtagen; print(mtagen.__version__, mtagen.__file__)")
    assert found.split() == [installed.distribution.version, str(installed.parent / "mtagen/mtagen/__init__.py")]


def test_type_checkers_find_the_package(installed: Installed, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--strict", "--cache-dir", tmp_path / "cache", "--python-executable", installed.python]
    printed = installed.run(sys.executable, "-m", "mypy", *options, program)
    assert 'Revealed type is "mtagen.ops.attention.' in printed


def required(distribution: Distribution, extras: set[str], system: str) -> set[str]:
    """Names of the packages that a distribution with these extras requires on an operating system."""
    found: set[str] = set()
    for one in map(Requirement, distribution.requires or []):
        environments = [{"platform_system": system, "extra": extra} for extra in extras or {""}]
        if one.marker is None or any(one.marker.evaluate(environment) for environment in environments):
            own = one.name == distribution.name
            found |= required(distribution, one.extras, system) if own else {one.name}
    return found


def test_a_mac_needs_no_package_for_gpus(installed: Installed) -> None:
    on_a_mac, on_linux = (required(installed.distribution, {"dev"}, system) for system in ("Darwin", "Linux"))
    assert not [name for name in on_a_mac if name.startswith(GPU_ONLY)]
    assert {"cuda-core", "mypy", "torch", "triton"} <= on_linux


def test_a_machine_without_a_gpu_needs_no_package_for_gpus(installed: Installed) -> None:
    assert not [name for name in required(installed.distribution, set(), "Linux") if name.startswith(GPU_ONLY)]
