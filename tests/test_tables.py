"""Measured decisions: shipped tables are sound and followed; the first table that has a decision wins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mtagen.planner.backends import CUDA_UP_TO, PASSES, fused_candidates, fused_pass
from test_plan import assert_fits

import mtagen
from mtagen import TARGETS, PlanError, Spec, plan
from mtagen.bench.suites import HEAD_DIMS, KERNELS
from mtagen.planner.lift.decode import DECODE_ROLES
from mtagen.planner.lift.tiling import Tile, proposals, table_key
from mtagen.planner.plan import Plan
from mtagen.planner.tables import SHIPPED, TUNED, Shape, Table, shipped, variant_key

HOPPER = TARGETS["sm_90a"]
PATHS = sorted((Path(mtagen.__file__).parent / "planner/tables").iterdir())


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_a_shipped_table_says_what_it_was_measured_on(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["device"].split()[0] in TARGETS[path.stem].device
    assert set(content["versions"]) == {"torch", "triton", "nvrtc"}
    table = Table.from_dict(content, SHIPPED)
    assert table == shipped(path.stem)
    assert {**content, **table.to_dict()} == content


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_tiles(path: Path) -> None:
    """Every tile is used by some plan, and fits."""
    for key, tile in shipped(path.stem).tiles.items():
        role, d, dv, name, count, size = re.fullmatch(r"(\w+) d(\d+) dv(\d+) (terms|taps)(\d+) bytes(\d)", key).groups()
        n, dtype = int(count), {"2": "bf16", "4": "fp32"}[size]
        kernel = (n, n) if role not in ("dq_lifted", "dk_shifted") else (n + 1, n)  # those two lift queries
        assert (name == "taps") == (role in DECODE_ROLES)
        made = plan(Spec(kernel, int(d), int(dv), dtype=dtype), path.stem, "triton")
        assert (role, tile, SHIPPED) in made.tiles
        assert_fits(made, role, tile, SHIPPED)


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_variants(path: Path) -> None:
    """Every variant is a candidate, and planned."""
    for key, variant in shipped(path.stem).variants.items():
        name, cq, ck, d, dv, dtype = re.fullmatch(r"(\w+) cq(\d+) ck(\d+) d(\d+) dv(\d+) (\w+)", key).groups()
        spec = Spec((int(cq), int(ck)), int(d), int(dv), dtype=dtype)
        assert variant_key(name, spec) == key
        assert (name, variant, SHIPPED) in plan(spec, path.stem, "cuda").variants


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_shipped_ratios(path: Path) -> None:
    """Every ratio is of a shape that both backends can do, and decides."""
    ratios = shipped(path.stem).cuda_over_triton
    assert set(ratios) <= set(PASSES)
    for pass_name, shapes in ratios.items():
        for (cq, ck, d, causal), ratio in shapes.items():
            chosen = next(
                c for c in plan(Spec((cq, ck), d, causal=causal), path.stem).choices if c.pass_name == pass_name
            )
            assert chosen.backend == ("cuda" if ratio <= CUDA_UP_TO else "triton")
            assert chosen.reason.endswith(SHIPPED)


def test_the_first_table_that_has_a_decision_wins() -> None:
    spec = Spec((6, 11), 64)
    slower = fused_candidates("forward", spec, HOPPER)[-1].variant
    base = plan(spec, HOPPER, "triton", tables=())
    tile = proposals("forward", spec, base.lift, HOPPER)[-1]
    key = table_key("forward", spec, base.lift)
    mine = Table(TUNED, {key: tile}, {variant_key("forward", spec): slower}, {"forward": {Shape(6, 11, 64, True): 3.0}})
    other = Table(SHIPPED, {key: Tile(16, 16)}, {}, {"forward": {Shape(6, 11, 64, True): 0.1}})
    for tables, source in (((mine, other), TUNED), ((other, mine), SHIPPED)):
        made = plan(spec, HOPPER, tables=tables)
        assert next(choice for choice in made.choices if choice.pass_name == "forward").reason.endswith(source)
    made = plan(spec, HOPPER, "triton", tables=(mine, other))
    assert ("forward", tile, TUNED) in made.tiles
    made = plan(spec, HOPPER, "cuda", tables=(mine, other))
    assert ("forward", slower, TUNED) in made.variants
    assert made.fused["forward"].variant == slower
    assert f"{slower} ({TUNED})" in str(made)
    again = Plan.from_json(made.to_json())
    assert (again, again.fused) == (made, made.fused)


def test_a_variant_that_is_no_candidate_is_passed_over() -> None:
    """A table may be older than the planner."""
    spec = Spec((6, 11), 64)
    table = Table(SHIPPED, variants={variant_key("forward", spec): "100 warps"})
    assert plan(spec, HOPPER, "cuda", tables=(table,)) == plan(spec, HOPPER, "cuda", tables=())
    with pytest.raises(PlanError, match="forward variant: got '100 warps'; is no candidate on sm_90a"):
        fused_pass("forward", spec, HOPPER, "100 warps")


def test_updated() -> None:
    one, three = Shape(1, 1, 64, True), Shape(3, 3, 64, True)
    old = Table(SHIPPED, {"a": Tile(16)}, {"x": "1", "y": "1"}, {"forward": {one: 1.0}})
    new = Table(TUNED, {"b": Tile(32)}, {"y": "2"}, {"forward": {three: 0.5}, "decode": {one: 0.9}})
    both = old.updated(new)
    assert both.source == SHIPPED
    assert both.tiles == {"a": Tile(16), "b": Tile(32)}
    assert both.variants == {"x": "1", "y": "2"}
    assert both.cuda_over_triton == {"forward": {one: 1.0, three: 0.5}, "decode": {one: 0.9}}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_h200_runs_cuda(kernel: tuple[int, int], head_dim: int, causal: bool) -> None:
    """The benchmark's specs are served by the backend whose calls cost the CPU least."""
    assert plan(Spec(kernel, head_dim, causal=causal), "sm_90a").backend == "cuda"
