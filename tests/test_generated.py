"""Rendered source: that in ``generated/`` is current; it is deterministic, clean, made once and stands alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest
from on_chip import mixed_on_chip
from test_unused import unused_in_python

import mtagen
from mtagen import PlanError, Spec, plan
from mtagen.codegen import Sources, emit, render, strip, triton
from mtagen.planner import Plan
from mtagen.planner.lift.module import LiftModule
from mtagen.planner.passes import PASSES
from mtagen.planner.strip.module import StripModule
from mtagen.runtime import load as runtime

FOLDER = Path(__file__).parent.parent / "generated"
TEMPLATES = Path(mtagen.__file__).parent / "templates"
COMMAND = "bash generated/regenerate.sh"
WIDTH = 120  # of a line
SHOWN = [Spec(kernel, head_dim) for kernel in ((6, 11), (1, 1)) for head_dim in (64, 128)]
LAYERS = [  # of the paper's models
    Spec((6, 11), 64, mixed_heads=16, post_kernel=(6, 11), post_mixed_heads=16),
    Spec(None, 64, mixed_heads=16, post_mixed_heads=16),
]
STRIPS = [  # together they take every branch of the templates of strips
    *(plan(spec, "sm_90a", "triton") for spec in LAYERS),
    plan(Spec(None, 40, mixed_heads=10, causal=False, dtype="fp16"), "sm_80", "triton"),
    plan(Spec(None, 96, 24, post_mixed_heads=4, dtype="fp32"), "generic", "triton"),
    plan(Spec(None, 64, mixed_heads=48, post_mixed_heads=36), "sm_90a", "triton"),
    plan(Spec((1, 7), 64, key_padding="left", mask="output", mixed_heads=3), "sm_90a", "triton"),
    plan(Spec((5, 2), 64, causal=False, post_mixed_heads=1), "sm_89", "triton"),
    plan(Spec((64, 64), 128, mask="output", post_kernel=(64, 64)), "sm_90a", "triton"),
    plan(Spec(None, 64, key_padding="right", post_kernel=(1, 8)), "sm_90a", "triton"),
    plan(Spec((3, 3), 80, 128, mask="output", post_kernel=(2, 5), post_mixed_heads=2, dtype="fp16"), "sm_80", "triton"),
    plan(replace(LAYERS[0], packed=True), "sm_90a", "triton"),
    plan(Spec(None, 64, mixed_heads=2, packed=True, dtype="fp16"), "sm_80", "triton"),
    plan(
        Spec((3, 3), 80, 24, mask="output", causal=False, mixed_heads=2, window=(9, 5), packed=True), "sm_90a", "triton"
    ),
]
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
    plan(Spec((6, 11), 64, packed=True), "sm_90a", "cuda"),
    plan(Spec((3, 3), 128, causal=False, packed=True), "sm_80", "cuda"),
]
CUDA_STRIPS = [  # together they take every template of strips in CUDA, and Triton's beside them
    plan(replace(LAYERS[0], packed=True, dropout=True), "sm_90a", "cuda"),
    plan(Spec((2, 3), 32, post_mixed_heads=4), "sm_90a"),
]
CPU, CUDA, PORTABLE_CUDA, TRITON = (
    plan(Spec((6, 11), 64), target, backend)
    for target, backend in (("cpu", "auto"), ("sm_90a", "cuda"), ("sm_80", "cuda"), ("sm_90a", "triton"))
)
STRIP = STRIPS[0]
ON_CHIP = mixed_on_chip(Spec(None, 64, mixed_heads=16, post_mixed_heads=16))
MIXED = plan(Spec((6, 11), 64, 256), "sm_90a")  # dV of such values does not fit the fused backward kernel


def name_of(made: Plan) -> str:
    return f"{made.backend}_{made.suffix}"


def emitted(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("mta_*")}


def python(code: str, *arguments: str, hash_seed: str = "0") -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def difference(old: dict[str, str], new: dict[str, str], limit: int = 200) -> str:
    """The first lines of a unified diff of emitted files, then the command that emits them; empty if they are equal."""
    lines: list[str] = []
    for name in sorted({*old, *new}):
        texts = (files.get(name, "").splitlines() for files in (old, new))
        lines += unified_diff(*texts, f"generated/{name}", f"emitted/{name}", lineterm="")
    if not lines:
        return ""
    rest = [f"and {len(lines) - limit} lines more"] if len(lines) > limit else []
    return "\n".join(["", *lines[:limit], *rest, f"If that is meant: {COMMAND}"])


def test_generated_folder_is_current(tmp_path: Path) -> None:
    for spec in SHOWN:
        emit(plan(spec, "sm_90a", "triton"), tmp_path)
        if spec.kernel == (6, 11):
            emit(plan(spec, "sm_90a", "cuda"), tmp_path)
    for spec in LAYERS:
        emit(plan(spec, "sm_90a", "triton"), tmp_path)
    emit(plan(replace(LAYERS[0], head_dim=128, value_head_dim=128), "sm_90a", "cuda"), tmp_path)
    changed = difference(emitted(FOLDER), emitted(tmp_path))
    assert not changed, changed


def test_a_difference_shows_what_changed_and_the_command() -> None:
    old, new = {"mta_a.cu": "one\ntwo\n", "mta_b.cu": "same\n"}, {"mta_a.cu": "one\nthree\n", "mta_b.cu": "same\n"}
    assert difference(old, old) == ""
    shown = difference(old, new).splitlines()
    assert shown[1:3] == ["--- generated/mta_a.cu", "+++ emitted/mta_a.cu"]
    assert shown[-3:] == ["-two", "+three", f"If that is meant: {COMMAND}"]
    assert difference(old, {}, limit=3).splitlines()[4:] == ["and 6 lines more", f"If that is meant: {COMMAND}"]


def regenerate(folder: Path, binaries: Path) -> int:
    """Run the command for a folder with the programs of another; return its exit status."""
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", FOLDER / "regenerate.sh", folder]
    return subprocess.run(command, capture_output=True, env=environment, check=False).returncode


def test_regenerate_writes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mta_stale.cu").touch()
    assert regenerate(tmp_path, Path(sys.executable).parent) == 0
    assert emitted(tmp_path) == emitted(FOLDER)


def test_regenerate_keeps_what_is_there_if_it_fails(tmp_path: Path) -> None:
    """After some files were emitted."""
    binaries, folder = tmp_path / "binaries", tmp_path / "folder"
    binaries.mkdir()
    folder.mkdir()
    program = binaries / "python"
    program.write_text(f"""#!/bin/sh
test ! -e {binaries}/ran || exit 1
touch {binaries}/ran
for last; do :; done
touch "$last"/mta_new.cu
""")
    program.chmod(0o755)
    (folder / "mta_old.cu").write_text("old")
    assert regenerate(folder, binaries) == 1
    assert emitted(folder) == {"mta_old.cu": "old"}


@pytest.mark.parametrize("made", [TRITON, CUDA, MIXED, STRIP, ON_CHIP], ids=name_of)
def test_a_file_for_each_source(made: Plan, tmp_path: Path) -> None:
    sources = render(made)
    assert sources.kernels.keys() == made.cuda.keys()
    names = {f"{made.cuda[name].name}.cu": text for name, text in sources.kernels.items()}
    lowered = {"tile": made.tile, "heads": made.heads, "lift": made.lift, "strip": made.strip}
    hosts = {name: f"mta_{lowering}_{made.suffix}.py" for lowering, passes in lowered.items() for name in passes}
    assert sources.hosts == hosts
    names |= {file: sources.files[file] for file in hosts.values()}
    assert not sources.tables
    assert sources.files == names
    paths = emit(made, tmp_path / "new" / "folder")
    assert {path.name: path.read_text() for path in paths} == names


def test_pytorch_ops_have_no_source(tmp_path: Path) -> None:
    assert render(CPU) == Sources({}, {}, {})
    with pytest.raises(PlanError, match="backend: got 'torch'; has no generated source"):
        emit(CPU, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_every_part_of_the_sources_is_in_their_digest() -> None:
    sources = render(MIXED)
    files = dict(sources.files)
    name = next(iter(files))
    changed = [
        *({**files, other: files[other] + "\n"} for other in files),
        {other: text for other, text in files.items() if other != name},
        {**{other: text for other, text in files.items() if other != name}, f"{name}2": files[name]},
    ]
    digests = {replace(sources, files=one).digest for one in (files, *changed)}
    assert len(digests) == len(changed) + 1
    assert replace(sources, files=dict(reversed(files.items()))).digest == sources.digest == render(MIXED).digest


def test_rendering_does_not_depend_on_hashes() -> None:
    """Fresh processes with other orders of sets agree, on the source and on the key of its cache entry."""
    code = """
from mtagen import Spec, plan
from mtagen.codegen import render
from mtagen.runtime.load import plan_key
for spec in (Spec((6, 11), 64), Spec((5, 2), 80, causal=False, dtype="fp32"), Spec((6, 11), 64, 128)):
    made = plan(spec, "sm_90a")
    sources = render(made)
    print(sources.files, made.to_json(), plan_key(made, sources))
"""
    first, second = (python(code, hash_seed=seed) for seed in ("1", "2"))
    assert first == second
    assert len(first) > 10_000


@pytest.mark.parametrize(
    ("made", "templates"),
    [
        (CUDA, [*2 * ["forward_sm90.cu.j2"], "backward_sm90.cu.j2", "decode.cu.j2", "host.py.j2"]),
        (PORTABLE_CUDA, [*2 * ["forward_sm80.cu.j2"], "backward_sm80.cu.j2", "decode.cu.j2", "host.py.j2"]),
        (TRITON, ["module.py.j2"]),
        (STRIP, ["strip_module.py.j2"]),
        (MIXED, ["decode.cu.j2", "host.py.j2", "module.py.j2"]),
        (CPU, []),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Plan) else "",
)
def test_build_renders_each_source_once(
    made: Plan, templates: list[str], rendered: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine without a GPU, where CUDA's sources are compiled; see ``interpreter/`` for calls.

    The forward kernel's template has two: that of splits of the keys is another.
    """
    compiled: Counter[str] = Counter()

    def compile_source(source: str, arch: str, name: str) -> bytes:
        compiled[name] += 1
        return b""

    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "devices_for", lambda _: [])
    monkeypatch.setattr(runtime, "cached_cubin", compile_source)
    backend = made.backend if made in (CUDA, PORTABLE_CUDA, TRITON, STRIP) else "auto"
    for builds in (1, 2):
        assert mtagen.build(**made.spec.to_dict(), backend=backend, target=made.target).plan == made
        assert rendered == Counter(builds * templates)
        assert compiled == {one.name: builds for one in made.cuda.values()}


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


@pytest.mark.parametrize("made", [*VARIANTS, *STRIPS], ids=name_of)
def test_modules_are_clean(made: Plan, tmp_path: Path) -> None:
    modules = {name: text for name, text in render(made).files.items() if name.endswith(".py")}
    assert modules
    for name, text in modules.items():
        assert_clean(text, tmp_path / name)


PREFIX = {"visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}}
TABLES = [  # together they take every branch of the template
    Spec((6, 11), 64, visible="i // 64 == j // 64"),
    Spec((6, 11), 64, causal=False, packed=True, **PREFIX),
    Spec(None, 64, causal=False, packed=True, page_size=16, **PREFIX),
    Spec(None, 64, visible="(j < sinks[b]) | (i - j < 128)", parameters={"sinks": "b"}, window=(500, 0)),
    Spec(None, 64, visible="(j < 4) | (i - j < 128)", packed=True, dropout=True),
    Spec(None, 64, visible="j < ends[b, i]", parameters={"ends": "b,i"}, mixed_heads=2, page_size=16),
]


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.visible)
def test_tables_of_a_mask_have_a_file(spec: Spec, tmp_path: Path) -> None:
    """It is clean, and has no code that nothing uses; specs with other masks have files of other names."""
    made = plan(spec, "sm_90a", "triton")
    sources = render(made)
    text = sources.files[sources.tables]
    assert_clean(text, tmp_path / sources.tables)
    tables = {f"{name}_tables" for name in sources.hosts}
    assert unused_in_python(text) == tables
    other = render(plan(replace(spec, visible="i // 32 == j // 32", parameters=()), "sm_90a", "triton"))
    same = render(plan(replace(spec, head_dim=128, value_head_dim=128), "sm_90a", "triton"))
    assert other.tables != sources.tables == same.tables


def test_module_of_heads_mixed_on_the_chip_is_clean(tmp_path: Path) -> None:
    sources = render(ON_CHIP)
    assert_clean(sources.files[sources.hosts["forward"]], tmp_path / sources.hosts["forward"])


@pytest.mark.parametrize("made", [*(one for one in VARIANTS if one.tile), *CUDA_STRIPS, ON_CHIP], ids=name_of)
def test_cuda_sources_are_clean(made: Plan) -> None:
    """They hold no marks of Jinja's, and blank lines as a formatter leaves them."""
    for source in render(made).kernels.values():
        assert not [mark for mark in ("{{ ", " }}", "{%", "%}", "{#", "#}") if mark in source]
        assert not [line for line in source.splitlines() if line != line.rstrip()]
        assert "\n\n\n" not in source
        assert source.endswith("\n")


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


@pytest.mark.parametrize(
    ("made", "passes"),
    [
        (made, passes)
        for made in STRIPS
        for passes in (*((name,) for name in PASSES), PASSES[:2])
        if made.strip.keys() >= {*passes}  # packed documents are for training
    ],
    ids=lambda value: name_of(value) if isinstance(value, Plan) else "_".join(value),
)
def test_strips_of_some_passes(made: Plan, passes: tuple[str, ...], tmp_path: Path) -> None:
    """They are clean, and have the kernels of these passes and no others."""
    source = strip.render(StripModule.of(made.strip[name] for name in passes))
    assert_clean(source, tmp_path / "module.py")
    defined = re.findall(r"^def (mta_\w+)\(", source, re.MULTILINE)
    assert sorted(defined) == sorted({kernel.name for name in passes for kernel in made.strip[name].kernels})
    assert all(f"{name},\n" in source for name in defined)


def test_lines_of_templates_and_of_generated_modules_fit() -> None:
    templates = [*TEMPLATES.glob("triton/*"), *TEMPLATES.glob("host/*"), TEMPLATES / "cuda/host.py.j2"]
    paths = [path for path in (*templates, *FOLDER.glob("*.py")) if path.is_file()]  # no __pycache__
    assert len(paths) > 20
    assert not [path.name for path in paths if any(len(line) > WIDTH for line in path.read_text().splitlines())]


def functions(folder: Path, *blocked: str) -> dict[str, list[str]]:
    """Of each module of a folder: the passes that it has, where these packages cannot be imported."""
    code = """
import importlib.util, pathlib, sys
import torch
folder, *blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked))  # importing them now fails
for path in sorted(pathlib.Path(folder).glob("*.py")):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("forward", "backward", "decode")
    print(path.name, *(name for name in names if callable(getattr(module, name, None))))
"""
    lines = python(code, str(folder), *blocked).splitlines()
    return {name: names for name, *names in map(str.split, lines)}


@pytest.mark.parametrize(
    ("backend", "lowering", "specs", "blocked"),
    [
        ("triton", "lift", SHOWN, ("mtagen", "cuda")),
        ("triton", "strip", LAYERS, ("mtagen", "cuda")),
        ("cuda", "tile", SHOWN, ("mtagen", "triton")),
    ],
    ids=["lift", "strip", "tile"],
)
def test_modules_stand_alone(
    backend: str, lowering: str, specs: list[Spec], blocked: tuple[str, ...], tmp_path: Path
) -> None:
    """They import, and have their three functions, where there is no mtagen, nor what the other backend needs."""
    made = [plan(spec, "sm_90a", backend) for spec in specs]
    for one in made:
        emit(one, tmp_path)
    found = functions(tmp_path, *blocked)
    assert found == {f"mta_{lowering}_{one.suffix}.py": ["forward", "backward", "decode"] for one in made}


def test_modules_have_the_passes_that_their_backend_serves(tmp_path: Path) -> None:
    emit(MIXED, tmp_path)
    assert functions(tmp_path, "mtagen") == {
        f"mta_tile_{MIXED.suffix}.py": ["decode"],
        f"mta_lift_{MIXED.suffix}.py": ["forward", "backward"],
    }
