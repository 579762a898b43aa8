"""The lowering "tile" at every head dim on every target: what addresses ask of its plans, and results in the emulator.

A sample of the plans runs always. ``python -m pytest -m sweep`` runs every plan, also those that only a tuning may
choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import problems
import pytest
from emulator import MMA_TARGETS, host_function, needs_compiler

from mtagen.errors import PlanError
from mtagen.measure.cases import Sizes
from mtagen.planner import get_target
from mtagen.planner.passes import PASSES
from mtagen.planner.tile.candidates import candidates
from mtagen.planner.tile.passes import TilePass
from mtagen.spec import HEAD_DIMS, Spec

EXTENTS = ((6, 11), (3, 3), (1, 1))  # large head dims leave no registers or shared memory for the larger ones
SIZES = Sizes(1, 2, 1, 135, 210)
# Decode steps: heads of queries, heads of keys, new tokens. Each group of heads takes another kernel.
STEPS = ((1, 1, 3), (4, 1, 1), (8, 1, 2))
VARIANTS: dict[str, dict[str, Any]] = {
    "source": {},
    "output": {"mask": "output", "window": (40, -1), "dtype": "fp16"},
}


def fitting(pass_name: str, spec: Spec, target: str) -> Sequence[Any]:
    """The plans that fit, the cheapest first; none if the spec is refused."""
    try:
        return candidates(pass_name, spec, get_target(target))
    except PlanError:
        return ()


def plans(pass_name: str, target: str, head_dim: int, **options: Any) -> Sequence[TilePass]:
    """The plans that fit, of the largest extent that has some."""
    of_extents = (fitting(pass_name, Spec(extent, head_dim, **options), target) for extent in EXTENTS)
    return next(filter(None, of_extents), ())


def shares(plan: Any) -> Iterator[tuple[Any, ...]]:
    """The decisions by which threads share the work of a plan, each group of them as a tuple."""
    if plan.pass_name == "forward":
        yield plan.hopper, plan.warps, plan.row_tiles, plan.query_fragments > 0
        yield plan.hopper, plan.keys
    elif plan.pass_name == "backward":
        key_warps, dq_parts = plan.geometry.key_warps, plan.geometry.dq_parts
        yield plan.hopper, plan.warps, plan.rows, plan.keys, copied_rows(plan) % 8, key_warps, dq_parts
    else:
        yield from ((tile.heads, tile.warps, tile.keys) for tile in plan.tiles)


def copied_rows(plan: Any) -> int:
    """Rows of Q, K, V or dO that the backward pass copies at a time: all threads do, or on Hopper a warpgroup."""
    return (128 if plan.hopper else plan.geometry.threads) // plan.geometry.row_lanes(plan.spec.head_dim)


def sample(pass_name: str) -> Iterator[TilePass]:
    """Plans of the smallest head dims in which threads share the work in each way that there is."""
    seen: set[tuple[Any, ...]] = set()
    for head_dim, target in itertools.product(HEAD_DIMS, MMA_TARGETS):
        for plan in plans(pass_name, target, head_dim):
            if not seen.issuperset(shares(plan)):
                seen.update(shares(plan))
                yield plan


def failures(plan: TilePass, folder: Path) -> list[str]:
    """Results of a plan that break the accuracy rule, a line each."""
    spec, host = plan.spec, host_function(plan, folder)
    if plan.pass_name == "forward":
        broken = problems.forward_failures(host, spec, problems.random(spec, SIZES))
    elif plan.pass_name == "backward":
        broken = problems.backward_failures(host, spec, problems.random(spec, SIZES))
    else:
        broken = []
        for heads, kv_heads, new_tokens in STEPS:
            problem = problems.random(spec, Sizes(2, heads, kv_heads, 1, 150), new_tokens=new_tokens)
            broken += problems.host_decode_failures(host, spec, problem, [150, 40], 2)
    return [f"{plan.name}, {dict(plan.fields)}: {line}" for line in broken]


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def test_blocks_and_rows_lie_powers_of_two_apart() -> None:
    """``swizzle.cuh`` computes an address from another one only then. And warps share blocks evenly."""
    for target, head_dim, extent in itertools.product(MMA_TARGETS, HEAD_DIMS, EXTENTS):
        spec = Spec(extent, head_dim)
        for plan in fitting("forward", spec, target):
            assert plan.hopper or is_power_of_two(plan.geometry.threads)  # which all copy; on Hopper 64 of them
            assert plan.keys % 16 == 0
        for plan in fitting("backward", spec, target):
            assert is_power_of_two(copied_rows(plan))
            assert plan.keys % (16 * plan.geometry.parts) == plan.rows % 16 == 0
            if not plan.hopper:  # there warpgroups have whole panels instead of blocks
                key_warps, dim_warps = plan.geometry.key_warps, plan.geometry.dim_warps
                assert all(map(is_power_of_two, (plan.geometry.parts, key_warps, dim_warps)))
                assert key_warps * dim_warps == plan.warps
                assert plan.keys // 16 % key_warps == head_dim // 16 % dim_warps == 0
        for plan in fitting("decode", spec, target):
            for tile in plan.tiles:
                assert is_power_of_two(tile.keys)
                assert is_power_of_two(tile.warps)
                assert tile.keys % (16 * tile.warps) == 0
                assert tile.tokens * tile.chunks == 16


@needs_compiler
@pytest.mark.usefixtures("memory_starts_as_nan", "one_thread")
@pytest.mark.parametrize(
    ("target", "spec"),
    [("sm_86", Spec((6, 11), 144)), ("sm_89", Spec((3, 3), 176)), ("sm_120", Spec((6, 11), 144, dtype="fp16"))],
    ids=["d144", "d176", "d144-fp16"],
)
def test_backward_that_copies_half_a_period_of_the_swizzle(target: str, spec: Spec, folder: Path) -> None:
    plan = fitting("backward", spec, target)[0]
    assert copied_rows(plan) == 4
    assert not failures(plan, folder)


@needs_compiler
@pytest.mark.usefixtures("memory_starts_as_nan", "one_thread")
@pytest.mark.parametrize("pass_name", PASSES)
def test_sample(pass_name: str, folder: Path) -> None:
    broken = [line for plan in sample(pass_name) for line in failures(plan, folder)]
    assert not broken, "\n".join(broken)


@pytest.mark.sweep
@needs_compiler
@pytest.mark.usefixtures("memory_starts_as_nan", "one_thread")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("target", MMA_TARGETS)
@pytest.mark.parametrize("pass_name", PASSES)
def test_every_plan(pass_name: str, target: str, head_dim: int, variant: str, folder: Path) -> None:
    made = plans(pass_name, target, head_dim, **VARIANTS[variant])
    if not made:
        pytest.skip("refused")
    broken = [line for plan in made for line in failures(plan, folder)]
    assert not broken, "\n".join(broken)
