"""What is predicted of several ranks is what they exchange and compute, counted row by row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torchrun import torchrun

from mtagen.distributed import Prediction, Rates, predict
from mtagen.distributed.sharding import ChunkCall, Sharding
from mtagen.spec import Spec

SPEC = Spec((6, 11), 16, 24)
RATES = Rates(forward=1e6, backward=2.5e5, link=1e6, latency=0.0)
PROBLEM: dict[str, Any] = {"length": 203, "ranks": 3, "heads": 4, "kv_heads": 2, "batch": 2}
SPECS = {
    "causal": SPEC,
    "window": replace(SPEC, window=(20, -1)),
    "window to both sides": replace(SPEC, causal=False, window=(9, 30)),
    "full": replace(SPEC, causal=False),
    "all stages": replace(SPEC, mixed_heads=2, post_kernel=(3, 3), post_mixed_heads=4),
}


def of(spec: Spec = SPEC, rates: Rates = RATES, **options: Any) -> Prediction:
    return predict(spec, rates, **PROBLEM | options)


def sees(spec: Spec, query: int, key: int) -> bool:
    return (spec.left is None or query - key <= spec.left) and (spec.right is None or key - query <= spec.right)


Bytes = list[list[tuple[int, int]]]
PAIR, QUERY = (
    2 * 2 * (16 + 24) * 2,
    2 * 4 * 16 * 2,
)  # of a row of 2 sequences in bf16, with 2 heads of keys and 4 of queries


def bytes_that_move(spec: Spec, balanced: bool) -> tuple[Bytes, Bytes, Bytes]:
    """By step and rank, those that come from other ranks and those that go there: in both passes, and of gradients."""
    held = Sharding(203, 3, balanced).held
    mine = [{row for chunk in chunks for row in chunk} for chunks in held]
    had: list[set[int]] = [set() for _ in range(3)]
    forward, backward, returned = [], [], []
    for chunks in zip(*held, strict=True):
        calls = [ChunkCall.of(chunk, 203, spec) for chunk in chunks]
        keys, context = [set(call.keys) for call in calls], [set(call.context) for call in calls]
        new = [keys[rank] - had[rank] for rank in range(3)]
        had = [had[rank] | keys[rank] for rank in range(3)]
        forward.append(from_and_to_others(mine, new, context))
        backward.append(from_and_to_others(mine, new, 3 * [set()]))
        returned.append([(come, go) for go, come in from_and_to_others(mine, keys, context)])
    return forward, backward, returned


def from_and_to_others(mine: list[set[int]], *needed: list[set[int]]) -> list[tuple[int, int]]:
    """Bytes that each rank gets, and gives, of keys and of queries."""
    moved = []
    for rank in range(3):
        gets = [len(rows[rank] - mine[rank]) for rows in needed]
        gives = [sum(len(rows[other] & mine[rank]) for other in range(3) if other != rank) for rows in needed]
        moved.append(tuple(PAIR * keys + QUERY * queries for keys, queries in (gets, gives)))
    return moved


def busiest(steps: Bytes) -> int:
    """Bytes of the rank that receives or sends most."""
    return max(max(map(sum, zip(*each, strict=True))) for each in zip(*steps, strict=True))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("balanced", [False, True])
def test_traffic_and_memory(spec: Spec, balanced: bool) -> None:
    made = of(spec, balanced=balanced)
    assert made.traffic == busiest([step for steps in bytes_that_move(spec, balanced) for step in steps])
    calls = [[ChunkCall.of(chunk, 203, spec) for chunk in chunks] for chunks in Sharding(203, 3, balanced).held]
    assert made.gathered == PAIR * max(len({row for call in each for row in call.keys}) for each in calls)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_time_of_computing(spec: Spec) -> None:
    """A link that takes no time leaves what the rank with the most scores computes."""
    made = of(spec, replace(RATES, link=1e30))
    per_rank = []
    for chunks in Sharding(203, 3, True).held:
        calls = [ChunkCall.of(chunk, 203, spec) for chunk in chunks]
        # Rows before a chunk and, where masks depend on positions, after it are computed too.
        rows = [(query, call.keys) for call in calls for query in call.queries]
        per_rank.append(8 * sum(sees(spec, query, key) for query, keys in rows for key in keys))
    assert made.forward_s == pytest.approx(max(per_rank) / RATES.forward)
    assert made.backward_s == pytest.approx(max(per_rank) / RATES.backward)
    alone = 8 * sum(sees(spec, query, key) for query in range(203) for key in range(203))
    assert made.alone_s == pytest.approx(alone / RATES.forward + alone / RATES.backward)


@pytest.mark.parametrize("balanced", [False, True])
def test_one_rank(balanced: bool) -> None:
    """It is alone, and communicates nothing."""
    made = of(ranks=1, balanced=balanced)
    assert made.traffic == 0
    assert made.speedup == pytest.approx(1)


def test_balance() -> None:
    """The later half of causal attention has three quarters of the scores."""
    long = {"length": 8192, "ranks": 2}
    assert of(replace(SPEC, kernel=None), replace(RATES, link=1e30), balanced=False, **long).speedup == pytest.approx(
        4 / 3, rel=1e-3
    )
    assert of(SPEC, replace(RATES, link=1e30), **long).speedup == pytest.approx(2, rel=1e-2)


def test_the_first_and_the_last_transfer_are_waited_for() -> None:
    """One of each kind: those of the other chunk are carried while the first is computed."""
    fast, slow = of(rates=replace(RATES, link=1e30)), of(rates=replace(RATES, link=1e9, latency=1e-3))
    assert 1e-3 < slow.forward_s - fast.forward_s < 1.2e-3
    assert 2e-3 < slow.backward_s - fast.backward_s < 2.4e-3


def test_a_slow_link_is_what_takes_time() -> None:
    """It carries what each chunk needs to the rank that needs most, in both passes, and gradients back."""
    made = of(rates=replace(RATES, link=1.0))
    forward, backward, returned = bytes_that_move(SPEC, True)
    first, second = (sum(max(map(max, each)) for each in steps) for steps in (forward, backward))
    assert made.forward_s == pytest.approx(first, rel=1e-4)
    assert made.backward_s == pytest.approx(second + busiest(returned), rel=1e-4)


def test_the_benchmark_measures_what_is_predicted(tmp_path: Path) -> None:
    """On the CPU, where its figures mean nothing."""
    path, sizes = tmp_path / "run.json", ["--head-dim", "16", "--heads", "4", "--kv-heads", "2", "--repeats", "1"]
    done = torchrun(2, "benchmarks/context_parallel.py", "--length", 64, "--length", 32, *sizes, "--json", path)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["ranks"] == 2
    assert [result["length"] for result in report["results"]] == [64, 32]
    for result in report["results"]:
        alone, spread, computed = (result[f"{name}_ms"]["both"] for name in ("alone", "spread", "computed"))
        assert result["speedup"] == pytest.approx(alone / spread)
        assert computed > 0
        assert 1 < result["predicted_speedup"] < 2
