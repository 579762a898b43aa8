"""Parameters of logits and sinks in the emitted CUDA kernels of "tile", run on a CPU that plays the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import problems
import pytest
import torch
from emulator import host_function, needs_compiler
from single_pass import cheapest
from test_emulated_kernels import case_id, op_of

from mtagen import PlanError, Spec, plan
from mtagen.check import failures
from mtagen.expressions import t5
from mtagen.measure.cases import Sizes
from mtagen.planner import get_target
from mtagen.planner.cuda.score import score_function

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory_starts_as_nan")]

SIZES = (Sizes(2, 8, 4, 33, 40), Sizes(1, 8, 2, 133, 150), Sizes(2, 8, 8, 70, 9))
OF_ALL_HEADS = {"logits": "s + t[max(0, min(6, i - j))] + u[j] + w[2]", "parameters": {"t": "7", "u": "j", "w": "3"}}
READING = [
    ("sm_90a", Spec((3, 3), 32, dtype="fp16", sink=True, **problems.READ)),
    ("sm_90a", Spec((1, 1), 32, window=(20, 5), causal=False, **problems.READ)),
    ("sm_80", Spec((3, 3), 32, window=(40, -1), sink=True, **problems.READ)),
]
TRAINED = [
    ("sm_90a", Spec((6, 11), 64, window=(40, -1), sink=True, **problems.OF_HEADS)),
    ("sm_90a", Spec((3, 3), 32, dtype="fp16", causal=False, sink=True)),
    ("sm_80", Spec((1, 1), 32, dtype="fp16", sink=True, **problems.OF_HEADS)),
    ("sm_80", Spec((3, 3), 32, mask="output", **problems.OF_HEADS)),
    ("sm_90a", Spec((6, 11), 64, sink=True, **problems.READ)),
    ("sm_80", Spec((3, 3), 32, dtype="fp16", window=(40, 5), causal=False, **problems.READ)),
    ("sm_90a", Spec((3, 3), 32, **OF_ALL_HEADS)),
]
OF_PAIRS = {"logits": "s / 2 + bias[h, i, j] * (i - j) / 8", "parameters": {"bias": "h,i,j"}}
OF_DOCUMENTS = {**problems.READ, "sink": True, "packed": True}
CONSTANTS_OF_DOCUMENTS: dict[str, Any] = {
    "logits": "s + c[b] * (i - j) / 8 + table[h, max(0, min(8, i - j))] - gates[b, h, j] + u[b, h, i]",
    "parameters": {"c": "b", "gates": "b,h,j", "table": "h,9", "u": "b,h,i"},
    "constants": ("c", "gates"),
    "packed": True,
}
ADDED: dict[str, Any] = {
    "logits": "s + d[h, 1, i] * (i - j) / 8 + c[h, max(0, min(8, i - j))] + t[b, h, j]",
    "parameters": {"c": "h,9", "d": "h,2,i", "t": "b,h,j"},
}
SCALED: dict[str, Any] = {"logits": "s * a[h] + t[b, h, j]", "parameters": {"a": "h", "t": "b,h,j"}}
CONSTANTS = [
    ("sm_90a", Spec((6, 11), 64, sink=True, constants=("c", "d"), **ADDED)),
    ("sm_90a", Spec((3, 3), 32, dtype="fp16", constants=("d", "t"), **ADDED)),
    ("sm_80", Spec((3, 3), 32, constants=("c", "d", "t"), **ADDED)),
    ("sm_90a", Spec((3, 3), 32, causal=False, constants=("a", "t"), **SCALED)),
]
UNFUSED = [
    ("s * t[h]", {"t": "h"}, "the gradient of t depends on scores"),
    ("tanh(s) + t[h]", {"t": "h"}, "the slope of the function is not a fixed number"),
    ("s + t[h, i] * (i - j)", {"t": "h,i"}, "t has an entry for each query"),
    ("s + t[h, min(4, j)]", {"t": "h,5"}, "the entry of t depends on more than i - j"),
]


def host_of(spec: Spec, target: str, folder: Path, name: str, splits: int | None = None) -> Any:
    """The host function of a pass."""
    return host_function(cheapest(name, spec, get_target(target)), folder, splits=splits)


@pytest.mark.parametrize(("target", "spec"), READING, ids=case_id)
def test_forward(target: str, spec: Spec, folder: Path) -> None:
    """Hidden scores may read entries that do not exist. The sink counts once, however many splits the keys have."""
    for splits in (1, 3):
        forward = host_of(spec, target, folder, "forward", splits)
        for sizes in SIZES:
            assert not problems.forward_failures(forward, spec, problems.random(spec, sizes))


@pytest.mark.parametrize(("target", "spec"), READING, ids=case_id)
def test_decode(target: str, spec: Spec, folder: Path) -> None:
    decode = host_of(spec, target, folder, "decode")
    for splits, lengths, new in ((1, (140, 3), 1), (3, (90, 0), 3)):
        problem = problems.random(spec, Sizes(2, 4, 2, 1, 140), new_tokens=new)
        assert not problems.host_decode_failures(decode, spec, problem, lengths, splits)


@pytest.mark.parametrize(("target", "spec"), TRAINED, ids=case_id)
def test_training(target: str, spec: Spec, folder: Path) -> None:
    op = op_of(spec, target, folder, 1)
    assert not failures(op, spec, torch.device("cpu"), SIZES)
    assert not problems.failures_through_lse(op, spec, problems.random(spec, SIZES[0]))


@pytest.mark.parametrize(("target", "spec"), CONSTANTS, ids=case_id)
def test_constants(target: str, spec: Spec, folder: Path) -> None:
    """Parameters without a gradient come before and after others. Kernels have no sums for their gradients."""
    op = op_of(spec, target, folder, 1)
    assert not failures(op, spec, torch.device("cpu"), SIZES[:2])
    summed = {x.view.parameter.name for x in score_function(spec).sums}
    assert summed == {name for name, _ in spec.parameters} - {*spec.constants}
    with pytest.raises(PlanError, match="gradients"):
        plan(replace(spec, constants=()), target, "cuda")


def test_pairs(folder: Path) -> None:
    """Each gradient is written once, those of hidden pairs are zeros. There are fewer queries than keys."""
    spec = Spec((3, 3), 32, window=(70, -1), **OF_PAIRS)
    op = op_of(spec, "sm_90a", folder, 1)
    assert not failures(op, spec, torch.device("cpu"), [Sizes(2, 2, 1, 133, 210)])


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_tables(target: str, folder: Path) -> None:
    spec = Spec((3, 3), 32, causal=False, **problems.BY_DISTANCE)
    op = op_of(spec, target, folder, 0)
    assert not failures(op, spec, torch.device("cpu"), [Sizes(1, 2, 1, 180, 190)])


def test_table_with_one_entry_for_far_keys(folder: Path) -> None:
    """Warps store the terms of near tiles only, and of the first tile."""
    spec = Spec((3, 3), 32, logits=t5(8, 20), parameters={"table": "h,8"})
    assert score_function(spec).same_from == 14
    op = op_of(spec, "sm_90a", folder, 0)
    assert not failures(op, spec, torch.device("cpu"), [Sizes(1, 2, 1, 133, 210)])


def test_gradients_where_a_table_hides_keys(folder: Path) -> None:
    """A step whose rows see all of its keys, and one whose rows do not."""
    parameters = problems.PREFIX["parameters"] | {"bias": "b,h,j"}
    spec = Spec((3, 3), 32, **problems.PREFIX | {"logits": "s + bias[b, h, j]", "parameters": parameters})
    op = op_of(spec, "sm_90a", folder, 0)
    assert not failures(op, spec, torch.device("cpu"), [Sizes(2, 2, 1, 90, 130)])


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_sums_of_keys_whose_terms_depend_on_places(target: str, folder: Path) -> None:
    """Their terms stay in registers, where the sums of other keys are read from the slab of gradients."""
    logits, parameters = "s + bias[b, h, j] * min(9, i - j) / 8 - gates[j] / 2", {"bias": "b,h,j", "gates": "j"}
    spec = Spec((3, 3), 32, window=(70, -1), logits=logits, parameters=parameters)
    assert sorted(x.is_of_columns for x in score_function(spec).sums) == [False, True]
    assert not failures(op_of(spec, target, folder, 0), spec, torch.device("cpu"), [Sizes(2, 2, 1, 90, 210)])


def test_dropout(folder: Path) -> None:
    spec = Spec((3, 3), 32, dtype="fp16", sink=True, dropout=True, **problems.READ)
    op = op_of(spec, "sm_80", folder, 0)
    assert not problems.failures_through_lse(op, spec, problems.random(spec, SIZES[0]), 0.3)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_constants_of_documents(target: str, folder: Path) -> None:
    spec = Spec((3, 3), 32, **CONSTANTS_OF_DOCUMENTS)
    host = {name: host_of(spec, target, folder, name) for name in ("forward", "backward")}
    assert not documents.failures(host, spec, [(133, 60), (0, 3), (9, 0), (20, 21)], 2, 1)


@pytest.mark.parametrize(("target", "kernel"), [("sm_90a", (6, 11)), ("sm_80", (1, 1))], ids=str)
def test_documents(target: str, kernel: tuple[int, int], folder: Path) -> None:
    """A document without keys has its sink. Rows behind the last document have no gradient, though they hold NaN."""
    spec = Spec(kernel, 64, **OF_DOCUMENTS)
    host = {name: host_of(spec, target, folder, name) for name in ("forward", "backward")}
    lengths = [(133, 60), (0, 3), (9, 0), (20, 21)]
    assert not documents.failures(host, spec, lengths, 2, 1)
    assert not documents.failures(documents.with_rest(host), spec, lengths, 2, 1)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_parameters_of_tokens_of_documents(target: str, folder: Path) -> None:
    """Each document reads its own entries, wherever its first tile of keys begins."""
    spec = Spec((3, 3), 32, packed=True, window=(30, -1), **problems.READ)
    host = {"forward": host_of(spec, target, folder, "forward")}
    assert not documents.failures(host, spec, [(5, 9), (250, 231), (20, 21)], 2, 1)


def test_gradients_that_are_not_fused() -> None:
    for logits, parameters, reason in UNFUSED:
        with pytest.raises(PlanError, match=reason):
            plan(Spec((3, 3), 32, logits=logits, parameters=parameters), "sm_90a", "cuda")
