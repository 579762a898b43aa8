"""Measured decisions: shipped tables are sound and followed; the first table that has a decision wins."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_plan import assert_fits

import mtagen
from mtagen import TARGETS, Plan, Spec, plan
from mtagen.bench.suites import HEAD_DIMS, KERNELS
from mtagen.planner.choice import COST_MODEL, CUDA_UP_TO, Choice, plan_pass
from mtagen.planner.lift.decode import DECODE_ROLES
from mtagen.planner.passes import PASSES, describe
from mtagen.planner.tables import SHIPPED, TUNED, Shape, Table, shipped

HOPPER = TARGETS["sm_90a"]
PATHS = sorted((Path(mtagen.__file__).parent / "planner/tables").iterdir())
LIFT = re.compile(r"lift (\w+) d(\d+) dv(\d+) (terms|taps)(\d+) bytes(\d)")
LAYERS: tuple[dict[str, Any], ...] = (
    {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16},
    {"kernel": (6, 11), "mixed_heads": 16, "post_kernel": (6, 11), "post_mixed_heads": 16},
    {"kernel": (6, 11), "post_mixed_heads": 2},
)
TILE = re.compile(r"tile (\w+) cq(\d+) ck(\d+) d(\d+) dv(\d+) (\w+)")


def decided(made: Plan) -> Mapping[str, tuple[Mapping[str, object], str]]:
    """Of each decision of a plan: what was decided, and where that comes from."""
    sources = {key: source for one in made.passes for key, source in one.sources}
    return {key: (fields, sources[key]) for one in made.passes for key, fields in one.plan.decisions().items()}


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_a_shipped_table_says_what_it_was_measured_on(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["device"].split()[0] in TARGETS[path.stem].device
    assert set(content["versions"]) == {"torch", "triton", "nvrtc"}
    table = Table.from_dict(content, SHIPPED)
    assert table == shipped(path.stem)
    assert {**content, **table.to_dict()} == content


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_decisions_are_of_known_lowerings(path: Path) -> None:
    keys = shipped(path.stem).decisions
    assert all(LIFT.fullmatch(key) or TILE.fullmatch(key) or key.startswith(("strip ", "lowering ")) for key in keys)
    assert {key.split()[0] for key in keys} >= {"lift", "tile"}


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_decisions_of_lift(path: Path) -> None:
    """Every tile is used by some plan, and fits."""
    for key, fields in shipped(path.stem).decisions.items():
        if not (match := LIFT.fullmatch(key)):
            continue
        role, d, dv, name, count, size = match.groups()
        n, dtype = int(count), {"2": "bf16", "4": "fp32"}[size]
        kernel = (n, n) if role not in ("dq_lifted", "dk_shifted") else (n + 1, n)  # those two lift queries
        assert (name == "taps") == (role in DECODE_ROLES)
        made = plan(Spec(kernel, int(d), int(dv), dtype=dtype), path.stem, "triton")
        assert decided(made)[key] == (fields, SHIPPED)
        (lifted,) = (one for one in made.lift.values() if key in one.decisions())
        assert_fits(lifted, role, SHIPPED)


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_decisions_of_tile(path: Path) -> None:
    """Every one is that of a candidate, and planned."""
    for key, fields in shipped(path.stem).decisions.items():
        if not (match := TILE.fullmatch(key)):
            continue
        name, cq, ck, d, dv, dtype = match.groups()
        made = plan(Spec((int(cq), int(ck)), int(d), int(dv), dtype=dtype), path.stem, "cuda")
        assert decided(made)[key] == (fields, SHIPPED)
        assert made.tile[name].decisions() == {key: fields}


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_decisions_of_strip_and_of_lowerings(path: Path) -> None:
    """Every one is that of a form or a lowering, and planned for a layer of the paper's models."""
    table, planned = shipped(path.stem), {}
    for layer, d in itertools.product(LAYERS, (64, 128)):
        planned |= decided(plan(Spec(head_dim=d, **layer), path.stem, "cuda"))
    for key in (key for key in table.decisions if key.startswith(("strip ", "lowering "))):
        assert planned[key] == (table.decisions[key], SHIPPED)


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_ratios(path: Path) -> None:
    """Every ratio is of a shape that both backends can do, and decides."""
    ratios = shipped(path.stem).cuda_over_triton
    assert set(ratios) <= set(PASSES)
    for pass_name, shapes in ratios.items():
        for shape, ratio in shapes.items():
            cq, ck, d, mask, *others = shape
            assert others == ["", 0]
            made = plan(Spec((cq, ck), d, causal={"causal": True, "full": False}[mask]), path.stem)
            chosen = next(one for one in made.passes if one.plan.pass_name == pass_name)
            assert chosen.backend == ("cuda" if ratio <= CUDA_UP_TO else "triton")
            assert chosen.reason.endswith(SHIPPED)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_first_table_that_has_a_decision_wins(backend: str) -> None:
    spec = Spec((6, 11), 64)
    base = plan(spec, HOPPER, backend, tables=())
    (key,) = base["forward"].decisions()
    *_, other, slowest = base["forward"].alternatives(key)
    mine, theirs = (
        Table(source, {key: one.decisions()[key]}, {"forward": {Shape.of(spec): ratio}})
        for source, one, ratio in ((TUNED, slowest, 3.0), (SHIPPED, other, 0.1))
    )
    for tables, source, winner in (((mine, theirs), TUNED, slowest), ((theirs, mine), SHIPPED, other)):
        made = plan(spec, HOPPER, tables=tables)
        assert next(one.reason for one in made.passes if one.plan.pass_name == "forward").endswith(source)
        made = plan(spec, HOPPER, backend, tables=tables)
        assert made["forward"] == winner
        assert decided(made)[key] == (winner.decisions()[key], source)
        assert f"{describe(winner.decisions()[key])} ({source})" in str(made)
        assert made["backward"] == base["backward"]
        assert Plan.from_json(made.to_json()) == made
    empty = Table(TUNED, {"tile forward cq9 ck9 d64 dv64 bf16": {}})
    assert plan(spec, HOPPER, backend, tables=(empty, mine)) == plan(spec, HOPPER, backend, tables=(mine,))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("wrong", [{"warps": 100}, {"warps": 12, "colour": 3}])
def test_a_decision_that_is_no_candidate_is_passed_over(backend: str, wrong: dict[str, int]) -> None:
    """A table may be older than the planner; the next one may know better."""
    spec = Spec((6, 11), 64)
    base = plan(spec, HOPPER, backend, tables=())
    (key,) = base["forward"].decisions()
    assert decided(base)[key][1] == COST_MODEL
    old = Table(TUNED, {key: wrong})
    assert plan(spec, HOPPER, backend, tables=(old,)) == base
    slowest = base["forward"].alternatives(key)[-1]
    newer = Table(SHIPPED, slowest.decisions())
    assert plan(spec, HOPPER, backend, tables=(old, newer))["forward"] == slowest


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_decision_serves_no_other_shape(backend: str) -> None:
    """What was measured for one head dim of values says nothing of another, nor one kernel of another."""
    spec = Spec((6, 11), 64)
    base = plan(spec, HOPPER, backend, tables=())["forward"]
    (key,) = base.decisions()
    table = Table(TUNED, base.alternatives(key)[-1].decisions())

    def source(spec: Spec) -> str:
        ((_, found),) = plan_pass(Choice("forward", backend, "a test"), spec, HOPPER, (table,)).sources
        return found

    assert source(spec) == TUNED
    for other in (Spec((6, 11), 64, 128), Spec((6, 11), 128, 64), Spec((5, 11), 64)):
        assert source(other) == COST_MODEL


def test_updated() -> None:
    one, three = Shape(1, 1, 64, "causal"), Shape(3, 3, 64, "causal")
    old = Table(SHIPPED, {"a": {"rows": 16}, "x": {"warps": 1}, "y": {"warps": 1}}, {"forward": {one: 1.0}})
    new = Table(TUNED, {"b": {"rows": 32}, "y": {"warps": 2}}, {"forward": {three: 0.5}, "decode": {one: 0.9}})
    both = old.updated(new)
    assert both.source == SHIPPED
    assert both.decisions == {"a": {"rows": 16}, "b": {"rows": 32}, "x": {"warps": 1}, "y": {"warps": 2}}
    assert both.cuda_over_triton == {"forward": {one: 1.0, three: 0.5}, "decode": {one: 0.9}}
    assert Table.from_dict(json.loads(json.dumps(both.to_dict())), SHIPPED) == both


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_h200_runs_cuda(kernel: tuple[int, int], head_dim: int, causal: bool) -> None:
    """The benchmark's specs are served by the backend whose calls cost the CPU least."""
    assert plan(Spec(kernel, head_dim, causal=causal), "sm_90a").backend == "cuda"


@pytest.mark.parametrize("stages", [{"kernel": (6, 11)}, *LAYERS], ids=str)
def test_packed_documents_and_dropout_follow_what_was_measured_without(stages: dict[str, Any]) -> None:
    plain = Spec(**stages, head_dim=128)
    before = decided(plan(plain, HOPPER))
    for data in ({"packed": True}, {"dropout": True}, {"packed": True, "dropout": True}):
        ours = decided(plan(replace(plain, **data), HOPPER))
        shared = ours.keys() & before.keys()  # where a fused kernel served small groups, there are other decisions, too
        assert {key: ours[key] for key in shared} == {key: before[key] for key in shared}
        assert SHIPPED in {source for _, source in ours.values()}
