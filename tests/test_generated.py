"""Rendered source: that in ``generated/`` is current; it is deterministic, clean, and Triton's stands alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mtagen
from mtagen import Spec, plan
from mtagen.codegen import emit, render, triton
from mtagen.planner import Plan
from mtagen.planner.lift.module import LiftModule
from mtagen.planner.passes import PASSES

FOLDER = Path(__file__).parent.parent / "generated"
TEMPLATES = Path(mtagen.__file__).parent / "templates"
WIDTH = 120  # of a line
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
    plan(Spec((16, 16), 128), "sm_90a", "triton"),
    plan(Spec((40, 9), 248, 152, dtype="fp16"), "sm_90a", "triton"),
    plan(Spec((64, 16), 248, 256, key_padding="right", mask="output", dtype="fp32"), "sm_90a", "triton"),
    plan(Spec((6, 11), 64, 128, key_padding="right", mask="output"), "sm_90a"),
    plan(Spec((16, 17), 64, key_padding="right", mask="output", dtype="fp16"), "sm_90a", "cuda"),
    plan(Spec((1, 1), 128, causal=False), "sm_80", "cuda"),
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
from mtagen.codegen import render
from mtagen.runtime.load import plan_key
for spec in (Spec((6, 11), 64), Spec((5, 2), 80, causal=False, dtype="fp32")):
    made = plan(spec, "sm_90a")
    sources = render(made)
    print(sources.files, made.to_json(), plan_key(made, sources))
"""
    first, second = (python(code, hash_seed=seed) for seed in ("1", "2"))
    assert first == second
    assert len(first) > 10_000


def assert_clean(source: str, path: Path) -> None:
    """Valid Python without Jinja's marks, whose lines fit; by ruff, no name is undefined and none unused."""
    ast.parse(source)
    assert not [mark for mark in ("{{", "}}", "{%", "%}", "{#", "#}") if mark in source]
    assert not [line for line in source.splitlines() if line != line.rstrip() or len(line) > WIDTH]
    assert not re.search(r":\n\n\s*[^\W\d]\w*(\.\w+)* [-+*]?= ", source)  # a block begins where it is opened
    path.write_text(source)
    check = ["ruff", "check", "--isolated", "--no-cache", "--select", "F,W,E3,E7,E9", "--preview", path]
    run = subprocess.run([sys.executable, "-m", *check], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("made", VARIANTS, ids=lambda made: f"{made.backend}_{made.suffix}")
def test_modules_are_clean(made: Plan, tmp_path: Path) -> None:
    modules = {name: text for name, text in render(made).files.items() if name.endswith(".py")}
    assert modules
    for name, text in modules.items():
        assert_clean(text, tmp_path / name)


@pytest.mark.parametrize("passes", [*((name,) for name in PASSES), PASSES[:2]], ids="_".join)
@pytest.mark.parametrize("spec", [Spec((6, 11), 64), Spec((5, 2), 64), Spec((2, 3), 40, causal=False)], ids=str)
def test_modules_of_some_passes(spec: Spec, passes: tuple[str, ...], tmp_path: Path) -> None:
    """They are clean, and their legend explains what occurs in their kernels and nothing else."""
    made = plan(spec, "sm_90a", "triton")
    source = triton.render(LiftModule.of(made.lift[name] for name in passes))
    assert_clean(source, tmp_path / "module.py")
    formulas, rest = source.split("Symbols\n")
    legend, code = rest.split('\n"""\n', maxsplit=1)
    explained = {name for line in legend.splitlines() for name in line[4:24].strip().split(", ")}
    assert not {name for name in explained if not re.search(rf"\b{name}\b", formulas + code, re.IGNORECASE)}
    names = "b d delta e f g grad h head i0 j0 pair partial s slot split strip t tap x"
    assigned = {name for name in names.split() if re.search(rf"^ +(for )?{name}(, \w+)* (=|in) ", code, re.MULTILINE)}
    assert assigned <= explained


def test_lines_of_templates_and_of_generated_modules_fit() -> None:
    templates = [*TEMPLATES.glob("triton/*"), *TEMPLATES.glob("host/*"), TEMPLATES / "cuda/host.py.j2"]
    paths = [*templates, *FOLDER.glob("*.py")]
    assert len(paths) > 20
    assert not [path.name for path in paths if any(len(line) > WIDTH for line in path.read_text().splitlines())]


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
    modules = {f"mta_{lowering}_{plan(spec, 'sm_90a').suffix}.py" for lowering in ("lift", "tile") for spec in SHOWN}
    modules -= {name for name in modules if name.startswith("mta_tile_cq1")}
    assert lines == [f"{name} forward backward decode" for name in sorted(modules)]
