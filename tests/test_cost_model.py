"""The cost models order candidates as they were measured on an H200 (benchmarks/results/h200_tune_*.json)."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from mtagen.planner import get_target
from mtagen.planner.backends import fused_pass
from mtagen.planner.lift.operands import lift
from mtagen.planner.lift.tiling import Tile, cost, table_key
from mtagen.planner.tables import variant_key
from mtagen.spec import Spec
from mtagen.tuning import Timed, mean_rank_correlation, rank_correlation

RUNS = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("h200_tune_*.json"))
HOPPER = get_target("sm_90a")
DECODED_EXTENT = {1: 1, 4: 3, 8: 7, 16: 11}  # of the kernels that were timed, by their padded taps


def modelled(key: str, name: str) -> float:
    """Today's cost of a measured candidate: a Triton kernel's tile, or a CUDA pass's variant."""
    if match := re.fullmatch(r"(\w+) d(\d+) dv(\d+) (?:terms|taps)(\d+) bytes2", key):
        role, d, dv, count = match[1], *map(int, match.groups()[1:])
        extent = DECODED_EXTENT[count] if role.startswith("decode") else count
        spec = Spec((extent, extent), d, dv)
        assert table_key(role, spec, lift(spec)) == key
        fields = dict(field.split("=") for field in name.split())
        tile = Tile(**{field: value if field == "pipeline" else int(value) for field, value in fields.items()})
        return cost(role, tile, spec, lift(spec), HOPPER)
    match = re.fullmatch(r"(\w+) cq(\d+) ck(\d+) d(\d+) dv(\d+) bf16", key)
    assert match, key
    cq, ck, d, dv = map(int, match.groups()[1:])
    spec = Spec((cq, ck), d, dv)
    assert variant_key(match[1], spec) == key
    made = fused_pass(match[1], spec, HOPPER, name)
    assert made.variant == name
    return made.cost


@pytest.fixture(scope="module")
def timings() -> list[Timed]:
    """Every candidate that was measured: its mean time over the runs that have it, with today's cost."""
    ms: dict[tuple[str, str], list[float]] = {}
    for run in RUNS:
        for row in json.loads(run.read_text())["timings"]:
            ms.setdefault((row["key"], row["name"]), []).append(row["ms"])
    return [Timed(key, name, modelled(key, name), statistics.fmean(times)) for (key, name), times in ms.items()]


def test_every_row_is_understood(timings: list[Timed]) -> None:
    assert len(timings) > 700
    assert all(timed.cost > 0 for timed in timings)
    roles = {timed.key.split()[0] for timed in timings}
    assert roles == {"forward", "backward", "scores", "dk_lifted", "dq_shifted", "decode", "decode_wide"}


def test_candidates_are_ranked_as_measured(timings: list[Timed]) -> None:
    assert len(rank_correlation(timings)) > 60
    assert mean_rank_correlation(timings) >= 0.8


def test_first_choice_is_close_to_the_fastest(timings: list[Timed]) -> None:
    losses = []
    for key in {timed.key for timed in timings}:
        rivals = [timed for timed in timings if timed.key == key]
        losses.append(min(rivals, key=lambda timed: timed.cost).ms / min(timed.ms for timed in rivals))
    assert statistics.fmean(losses) <= 1.03
