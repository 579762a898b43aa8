"""The cost models order candidates as they were measured on an H200 (benchmarks/results/h200_tune_*.json)."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from mtagen.planner.choice import lowerings
from mtagen.planner.passes import Fields, describe
from mtagen.spec import Spec
from mtagen.tuning import Timed, mean_rank_correlation, rank_correlation

RUNS = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("h200_tune_*.json"))
DECODED_EXTENT = {1: 1, 4: 3, 8: 7, 16: 11}  # of the kernels that were timed, by their padded taps
PASSES = {"forward": "forward", "decode": "decode", "decode_wide": "decode"}  # by role, the others: backward


def modelled(key: str, fields: Fields) -> float:
    """Today's cost of a measured candidate: of one Triton kernel, or of a CUDA pass."""
    if match := re.fullmatch(r"lift (\w+) d(\d+) dv(\d+) (?:terms|taps)(\d+) bytes2", key):
        role, d, dv, count = match[1], *map(int, match.groups()[1:])
        extent = DECODED_EXTENT[count] if role.startswith("decode") else count
        backend, pass_name, spec = "triton", PASSES.get(role, "backward"), Spec((extent, extent), d, dv)
    else:
        match = re.fullmatch(r"tile (\w+) cq(\d+) ck(\d+) d(\d+) dv(\d+) bf16", key)
        assert match, key
        cq, ck, d, dv = map(int, match.groups()[1:])
        backend, pass_name, spec = "cuda", match[1], Spec((cq, ck), d, dv)
    made = next(iter(lowerings(backend, spec).values())).from_fields(pass_name, spec, "sm_90a", {key: fields})
    assert made.decisions()[key] == fields
    return made.decision_cost(key)


@pytest.fixture(scope="module")
def timings() -> list[Timed]:
    """Every candidate that was measured: its mean time over the runs that have it, with today's cost."""
    ms: dict[tuple[str, str], list[float]] = {}
    fields: dict[tuple[str, str], Fields] = {}
    for run in RUNS:
        for row in json.loads(run.read_text())["timings"]:
            candidate = (row["key"], describe(row["fields"]))
            fields[candidate] = row["fields"]
            ms.setdefault(candidate, []).append(row["ms"])
    return [
        Timed(key, fields[key, name], modelled(key, fields[key, name]), statistics.fmean(times))
        for (key, name), times in ms.items()
    ]


def test_every_row_is_understood(timings: list[Timed]) -> None:
    assert len(timings) > 700
    assert all(timed.cost > 0 for timed in timings)
    decided = {tuple(timed.key.split()[:2]) for timed in timings}
    assert decided == {
        *(("tile", name) for name in ("forward", "backward", "decode")),
        *(("lift", role) for role in ("forward", "scores", "dk_lifted", "dq_shifted", "decode", "decode_wide")),
    }


def test_candidates_are_ranked_as_measured(timings: list[Timed]) -> None:
    assert len(rank_correlation(timings)) > 60
    assert mean_rank_correlation(timings) >= 0.8


def test_first_choice_is_close_to_the_fastest(timings: list[Timed]) -> None:
    losses = []
    for key in {timed.key for timed in timings}:
        rivals = [timed for timed in timings if timed.key == key]
        losses.append(min(rivals, key=lambda timed: timed.cost).ms / min(timed.ms for timed in rivals))
    assert statistics.fmean(losses) <= 1.03
