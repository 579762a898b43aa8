"""The tables of docs/pipelines.md: every pipeline, what makes each of its passes, and the tests behind that."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mtagen import PlanError, Spec, plan
from mtagen.planner.choice import candidates
from mtagen.planner.passes import PASSES
from mtagen.planner.targets import get_target
from mtagen.spec import WEIGHTS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
KINDS = ("none", "convolution", "mixing", "both")
STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # before and after the softmax
    "none": ({"kernel": None}, {}),
    "convolution": ({"kernel": (6, 11)}, {"post_kernel": (5, 8)}),
    "mixing": ({"kernel": None, "mixed_heads": 16}, {"post_mixed_heads": 8}),
    "both": ({"kernel": (6, 11), "mixed_heads": 16}, {"post_kernel": (5, 8), "post_mixed_heads": 8}),
}


def table(first: str) -> list[list[str]]:
    """The rows of the table whose header begins so."""
    (body,) = re.findall(rf"^\| {first} .*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


LOWERINGS = {(before, after): cells for before, after, *cells in table("before the softmax")}
TESTS = {name: dict(zip(PASSES, cells, strict=True)) for name, *cells in table(r"lowering \| forward")}


DATA: dict[str, dict[str, Any]] = {
    "window": {"window": (70, -1)},
    "documents": {"packed": True},
    "dropout": {"dropout": True},
}
DATA_LOWERINGS = {(before, after): cells for before, after, *cells in table("pipeline: before the softmax")}
DATA_TESTS = {name: cells for name, *cells in table(r"lowering \| window")}


def module_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"named_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(node_id: str) -> set[str]:
    """The ids of a test's parameters."""
    path, name = node_id.strip("`").split("::")
    (mark,) = (mark for mark in getattr(module_of(path), name).pytestmark if mark.name == "parametrize")
    return {*mark.kwargs.get("ids", mark.args[1])}


def test_every_pipeline_has_a_row() -> None:
    assert [*LOWERINGS] == [*DATA_LOWERINGS] == [*itertools.product(KINDS, KINDS)]


@pytest.mark.parametrize(("before", "after"), DATA_LOWERINGS, ids=" ".join)
def test_lowerings_of_windows_documents_and_dropout(before: str, after: str) -> None:
    for data, cell in zip(DATA.values(), DATA_LOWERINGS[before, after], strict=True):
        spec = Spec(head_dim=64, **STAGES[before][0], **STAGES[after][1], **data)
        for pass_name in ("forward", "backward"):
            found = {}
            for backend in ("cuda", "triton"):
                found[backend] = candidates(backend, pass_name, spec, get_target("sm_90a"))[0].lowering
            assert dict(one.split(": ") for one in cell.split(", ")) == found
            assert {*found.values(), "tiled ops"} <= DATA_TESTS.keys()


@pytest.mark.parametrize(("before", "after"), LOWERINGS, ids=" ".join)
def test_lowerings_are_those_of_plans(before: str, after: str) -> None:
    """If heads only mix, "heads" may replace "strip" in the forward pass, as the text above the table says."""
    spec = Spec(head_dim=64, **STAGES[before][0], **STAGES[after][1])
    made_plan = plan(spec, "sm_90a")
    assert not made_plan.heads or {before, after} <= {"none", "mixing"}
    for pass_name, cell in zip(PASSES, LOWERINGS[before, after], strict=True):
        found = {}
        for backend in ("cuda", "triton", "torch"):
            try:
                (made,) = candidates(backend, pass_name, spec, get_target("sm_90a"))[:1]
                found[backend] = made.lowering
            except PlanError:
                continue
        assert found.pop("torch") == "tiled ops"
        assert dict(one.split(": ") for one in cell.split(", ")) == found
        chosen = made_plan[pass_name]
        assert chosen.lowering == ("heads" if pass_name in made_plan.heads else found[chosen.backend])
        assert {*found.values(), "tiled ops"} <= TESTS.keys()


def test_named_tests_exist() -> None:
    for node_id in itertools.chain(*(cells.values() for cells in TESTS.values()), *DATA_TESTS.values()):
        path, name = node_id.strip("`").split("::")
        functions = (x.name for x in ast.parse((ROOT / path).read_text()).body if isinstance(x, ast.FunctionDef))
        assert name in functions, node_id


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("name", ["strip", "tiled ops"])
def test_named_tests_run_every_row(name: str, pass_name: str) -> None:
    ids = parameters(TESTS[name][pass_name])
    cells = {pair: dict(zip(PASSES, row, strict=True))[pass_name] for pair, row in LOWERINGS.items()}
    rows = [pair for pair, cell in cells.items() if name == "tiled ops" or name in cell]
    assert len(rows) == (16 if name == "tiled ops" else 14)
    for before, after in rows:
        assert any(one.startswith(f"{before} before, {after} after") for one in ids)


def test_arguments_and_weights_of_stages() -> None:
    rows = table("stage")
    assert [re.findall(r"`(\w+)=", row[1]) for row in rows] == [
        ["kernel"],
        ["mixed_heads"],
        ["post_kernel"],
        ["post_mixed_heads"],
    ]
    assert tuple(row[2].strip("`") for row in rows) == WEIGHTS
    spec = Spec((6, 11), 64, mixed_heads=4, post_kernel=(5, 8), post_mixed_heads=2)
    sizes = [{"H": 16, "cq": cq, "ck": ck, "m": m} for cq, ck, m in ((6, 11, 0), (0, 0, 4), (5, 8, 0), (0, 0, 2))]
    for row, shape, names in zip(rows, spec.weights(16).values(), sizes, strict=True):
        (expression,) = re.findall(r"`(\(.*\))`", row[3])
        assert eval(expression.replace("/", "//"), {}, names) == shape
