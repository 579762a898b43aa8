"""Rendered source: that in ``generated/`` is current; it is deterministic, clean, and Triton's stands alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtagen import Spec, plan
from mtagen.codegen import emit
from mtagen.codegen.triton import render
from mtagen.planner import Plan

FOLDER = Path(__file__).parent.parent / "generated"
SHOWN = [Spec(kernel, head_dim) for kernel in ((6, 11), (1, 1)) for head_dim in (64, 128)]
VARIANTS = [  # together they take every branch of the templates
    plan(Spec((6, 11), 80, 24, causal=False), "sm_90a", "triton"),
    plan(Spec((6, 11), 64, key_padding="right", mask="output"), "sm_90a", "triton"),
    plan(Spec((5, 2), 16, dtype="fp32"), "sm_80", "triton"),
    plan(Spec((5, 2), 128, causal=False, key_padding="left", dtype="fp16"), "gfx942", "triton"),
    plan(Spec((1, 1), 24, causal=False, dtype="fp32"), "generic", "triton"),
    plan(Spec((3, 1), 64, mask="output"), "sm_89", "triton"),
    plan(Spec((1, 7), 256), "sm_89", "triton"),
    plan(Spec((3, 40), 64), "sm_90a", "triton"),
]


def emitted(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("mta_*")}


def python(code: str, *arguments: str, hash_seed: str = "0") -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_generated_folder_is_current(tmp_path: Path) -> None:
    """If not: bash generated/regenerate.sh."""
    for spec in SHOWN:
        emit(plan(spec, "sm_90a", "triton"), tmp_path)
        if spec.kernel == (6, 11):
            emit(plan(spec, "sm_90a", "cuda"), tmp_path)
    assert emitted(FOLDER) == emitted(tmp_path)


def test_cuda_sources_have_no_function_that_nothing_calls() -> None:
    for path in FOLDER.glob("*.cu"):
        source = path.read_text()
        names = set(re.findall(r"^DEVICE .*?(\w+)(?:<\w+>)?\(", source, re.MULTILINE))
        assert len(names) > 10
        for name in names:
            definitions = len(re.findall(rf"^DEVICE [^(]*?\b{name}(?:<\w+>)?\(", source, re.MULTILINE))
            assert len(re.findall(rf"\b{name}\b", source)) > definitions, name


def test_regenerate_writes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mta_stale.cu").touch()
    binaries = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": binaries + os.pathsep + os.environ["PATH"]}
    subprocess.run(["bash", FOLDER / "regenerate.sh", tmp_path], check=True, capture_output=True, env=environment)
    assert emitted(tmp_path) == emitted(FOLDER)


def test_rendering_does_not_depend_on_hashes() -> None:
    """Fresh processes with other orders of sets agree, on the source and on the key of its cache entry."""
    code = """
from mtagen import Spec, plan
from mtagen.codegen import sources
from mtagen.runtime.load import plan_key
for spec in (Spec((6, 11), 64), Spec((5, 2), 80, causal=False, dtype="fp32")):
    made = plan(spec, "sm_90a")
    print(sources(made), made.to_json(), plan_key(made))
"""
    first, second = (python(code, hash_seed=seed) for seed in ("1", "2"))
    assert first == second
    assert len(first) > 10_000


@pytest.mark.parametrize("made", VARIANTS, ids=lambda made: made.suffix)
def test_source_is_clean(made: Plan, tmp_path: Path) -> None:
    """Valid Python without Jinja's marks; by ruff, no name is undefined and none unused."""
    source = render(made)
    ast.parse(source)
    assert not [mark for mark in ("{{", "}}", "{%", "%}", "{#", "#}") if mark in source]
    assert not [line for line in source.splitlines() if line != line.rstrip()]
    path = tmp_path / f"{made.name}.py"
    path.write_text(source)
    check = ["ruff", "check", "--isolated", "--no-cache", "--select", "F,W,E7,E9", path]
    run = subprocess.run([sys.executable, "-m", *check], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_modules_stand_alone() -> None:
    """They import, and have their three functions, where there is no mtagen."""
    code = """
import importlib.util, pathlib, sys
sys.modules["mtagen"] = None  # importing it now fails
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("forward", "backward", "decode")
    print(path.name, *(name for name in names if callable(getattr(module, name, None))))
"""
    lines = python(code, str(FOLDER)).splitlines()
    names = sorted(f"{plan(spec, 'sm_90a').name}.py" for spec in SHOWN)
    assert lines == [f"{name} forward backward decode" for name in names]
