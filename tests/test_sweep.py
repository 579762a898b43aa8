"""The lowering "tile" at every head dim on every target: what its plans promise, and what the emulator makes of them.

A sample of the plans runs always. All of them, those that a tuning may choose as well, run with
``python -m pytest -m sweep``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import problems
import pytest
from emulator import host_function, needs_compiler

from mtagen.errors import PlanError
from mtagen.measure.cases import Sizes
from mtagen.planner import TARGETS, get_target
from mtagen.planner.passes import PASSES
from mtagen.planner.tile.candidates import candidates
from mtagen.planner.tile.passes import TilePass
from mtagen.spec import HEAD_DIMS, Spec

MMA_TARGETS = tuple(name for name, target in TARGETS.items() if "mma" in target.matrix)
EXTENTS = ((6, 11), (3, 3), (1, 1))  # the larger ones take memory and registers that large head dims do not leave
SIZES = Sizes(1, 2, 1, 135, 210)
# Of a decode step: heads of queries and of keys, and new tokens. Each pair of heads takes another kernel.
STEPS = ((1, 1, 3), (4, 1, 1), (8, 1, 2))
VARIANTS = {
    "source": {},
    "output": {"mask": "output", "window": (40, -1), "dtype": "fp16"},
}


def plans(pass_name: str, target: str, head_dim: int, **options: Any) -> Sequence[TilePass]:
    """The plans that fit, of the largest extent that has some; none if all are refused."""
    for extent in EXTENTS:
        try:
            return candidates(pass_name, Spec(extent, head_dim, **options), get_target(target))
        except PlanError:
            continue
    return ()


def shares(plan: Any) -> Iterator[tuple[Any, ...]]:
    """Ways in which threads share the work of a plan, each with the decisions that it depends on."""
    if plan.pass_name == "forward":
        yield plan.hopper, plan.warps, plan.row_tiles, plan.query_fragments > 0
        yield plan.hopper, plan.keys
    elif plan.pass_name == "backward":
        yield plan.hopper, plan.warps, plan.rows, plan.keys, copied_rows(plan) % 8, plan.key_warps, plan.dq_parts
    else:
        yield from ((tile.heads, tile.warps, tile.keys) for tile in plan.tiles)


def copied_rows(plan: Any) -> int:
    """Rows of Q, K, V or dO that threads of the backward pass copy at a time; a warpgroup of them on Hopper."""
    return (128 if plan.hopper else plan.threads) // plan.row_lanes


def sample(pass_name: str) -> Iterator[TilePass]:
    """Plans of the smallest head dims in which the work is shared in all ways that there are."""
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


def test_blocks_and_rows_lie_powers_of_two_apart() -> None:
    """The addresses of swizzled tiles need it, see ``swizzle.cuh``, and that warps share blocks evenly."""
    for target, head_dim, dtype in itertools.product(MMA_TARGETS, HEAD_DIMS, ("bf16", "fp16")):
        for plan in plans("backward", target, head_dim, dtype=dtype):
            blocks = plan.keys // 16
            steps = (copied_rows(plan), plan.parts)
            if not plan.hopper:
                steps = (*steps, plan.key_warps, plan.dim_warps)
                assert plan.key_warps * plan.dim_warps == plan.warps
                assert blocks % plan.key_warps == head_dim // 16 % plan.dim_warps == 0
                assert all(step & (step - 1) == 0 < step for step in steps), plan
            assert plan.keys % plan.parts == plan.rows % 16 == 0
        for plan in plans("forward", target, head_dim, dtype=dtype):
            assert plan.hopper or plan.threads & (plan.threads - 1) == 0
            assert plan.keys % 16 == 0
        for plan in plans("decode", target, head_dim, dtype=dtype):
            for tile in plan.tiles:
                assert tile.keys % (16 * tile.warps) == tile.warps & (tile.warps - 1) == 0
                assert tile.tokens * tile.chunks == 16


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
