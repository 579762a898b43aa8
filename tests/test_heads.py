"""Plans of the lowering "heads", and its kernels as CUDA's compiler makes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from on_chip import mixed_on_chip

from mtagen import Plan, Spec, plan
from mtagen.codegen import cuda, render
from mtagen.errors import PlanError
from mtagen.planner import get_target
from mtagen.planner.geometry.affine import N_K, N_Q
from mtagen.planner.heads.kernels import OutputsKernel
from mtagen.planner.heads.passes import HeadsForward, candidates, key
from mtagen.planner.passes import rounds_alike
from mtagen.planner.sizes import BATCH, HEADS
from mtagen.planner.strip.on_chip import why_not
from mtagen.planner.strip.passes import StripPass
from mtagen.planner.strip.stages import PROBABILITY_SCALE
from mtagen.planner.tables import SHIPPED, Table
from mtagen.runtime.nvrtc import compile_cubin
from mtagen.runtime.offline import usage_of_cubins

BOTH = Spec(None, 64, mixed_heads=16, post_mixed_heads=16)
SM90 = get_target("sm_90a")
STACK = 40  # bytes of a thread


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"post_mixed_heads": None, "causal": False, "window": (40, 7), "dtype": "fp16"}, ""),
        ({"mixed_heads": 4, "post_mixed_heads": 2, "head_dim": 32, "value_head_dim": 48}, ""),
        ({"kernel": (6, 11)}, "kernels that mix heads on the chip lack kernel"),
        ({"packed": True, "dropout": True}, "kernels that mix heads on the chip lack packed, dropout"),
        ({"logits": "s / 2", "sink": True}, "kernels that mix heads on the chip lack logits, sink"),
        ({"mixed_heads": 20, "post_mixed_heads": None}, "at most 16 heads mix with each other on the chip"),
        ({"mixed_heads": 3}, "at most 16 heads mix with each other on the chip"),
        ({"head_dim": 128, "value_head_dim": None}, "heads mix on the chip at head dims up to 64 in multiples of 16"),
        ({"value_head_dim": 24}, "heads mix on the chip at head dims up to 64 in multiples of 16"),
    ],
)
def test_which_specs_mix_on_the_chip(changed: dict[str, Any], reason: str) -> None:
    spec = replace(BOTH, **changed)
    assert why_not(spec, SM90) == reason
    made = mixed_on_chip(spec)
    assert made["forward"].lowering == ("strip" if reason else "heads")
    assert {one.plan.lowering for one in made.passes[1:]} == {"strip"}
    if not reason:
        assert "lowering=heads (measured)" in str(made)
    else:
        assert f"strip: {reason}" in str(made)
        with pytest.raises(PlanError, match=re.escape(reason)):
            candidates("forward", spec, SM90)


def test_other_requests_have_strips() -> None:
    rule = "heads mix on the chip in bf16 and fp16 on sm_90a"
    assert why_not(replace(BOTH, dtype="fp32"), SM90) == why_not(BOTH, get_target("sm_80")) == rule
    assert why_not(Spec((6, 11), 64), SM90) == "no heads mix"
    assert mixed_on_chip(BOTH, "sm_80")["forward"].lowering == "strip"
    assert mixed_on_chip(BOTH, backend="triton")["forward"].lowering == "strip"
    for pass_name in ("backward", "decode"):
        with pytest.raises(PlanError, match="the lowering heads has no kernels for it"):
            candidates(pass_name, BOTH, SM90)


def test_a_table_decides() -> None:
    """For this spec alone; the first table that names a lowering does. The shipped table names "heads" for one op."""
    assert "lowering=heads (measured)" in str(plan(BOTH, "sm_90a"))
    assert key(BOTH) == "lowering forward causal mix16_postmix16 d64 dv64 bf16"
    eight = replace(BOTH, mixed_heads=8, post_mixed_heads=8)
    for spec, other in ((BOTH, replace(BOTH, dtype="fp16")), (eight, replace(eight, head_dim=48, value_head_dim=48))):
        by_cost = plan(spec, "sm_90a", tables=())["forward"].lowering
        for named in ("strip", "heads"):
            table = Table("by hand", {key(spec): {"lowering": named}})
            made = plan(spec, "sm_90a", tables=(table, Table(SHIPPED, {key(spec): {"lowering": by_cost}})))
            assert made["forward"].lowering == named
            assert plan(other, "sm_90a", tables=(table,)) == plan(other, "sm_90a", tables=())
            if named == "heads":
                assert "lowering=heads (by hand)" in str(made)


@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"window": (300, -1)},
        {"causal": False},
        {"dtype": "fp16"},
        {"post_mixed_heads": 8},
        {"mixed_heads": None},
        {"post_mixed_heads": None},
        {"mixed_heads": 12, "post_mixed_heads": 6},
        {"head_dim": 16, "value_head_dim": 16},
    ],
    ids=str,
)
def test_faster_than_strips(changed: dict[str, Any], backend: Any) -> None:
    """By the cost models. The backward pass and decode are those of strips, in CUDA."""
    made = plan(replace(BOTH, **changed), "sm_90a", backend, tables=())
    assert [(one.backend, one.plan.lowering) for one in made.passes] == [
        ("cuda", "heads"),
        ("cuda", "strip"),
        ("cuda", "strip"),
    ]
    assert "lowering=heads (cost model)" in str(made)
    assert made["forward"].cost < StripPass(made.spec, "sm_90a", "forward", "cuda").cost
    assert rounds_alike(made["forward"], made["backward"])


@pytest.mark.parametrize("changed", [{"mixed_heads": 8, "post_mixed_heads": 8}, {"mixed_heads": 4}], ids=str)
def test_slower_than_strips(changed: dict[str, Any]) -> None:
    """Calls may have so few heads that most of a bundle is empty."""
    made = plan(replace(BOTH, **{"post_mixed_heads": None, **changed}), "sm_90a", tables=())
    assert made["forward"].lowering == "strip"
    assert HeadsForward(made.spec, "sm_90a").cost > made["forward"].cost
    assert "strip: expected to be faster than heads" in str(made)


@pytest.mark.parametrize(
    "changed",
    [
        {"packed": True},
        {"dropout": True},
        {"head_dim": 128, "value_head_dim": 128},
        {"kernel": (6, 11)},
        {"sink": True},
    ],
    ids=str,
)
def test_other_specs_have_strips(changed: dict[str, Any]) -> None:
    assert {one.plan.lowering for one in plan(replace(BOTH, **changed), "sm_90a").passes} == {"strip"}


def test_no_heads_before_a_backward_pass_that_reads_unmixed_outputs() -> None:
    spec = Spec(None, 64, post_mixed_heads=2)
    with pytest.raises(PlanError, match="no kernels for it: the fused backward pass reads unmixed outputs"):
        candidates("forward", spec, get_target("sm_90a"))
    assert mixed_on_chip(spec)["forward"].lowering == "strip"


def test_plan() -> None:
    made = mixed_on_chip(BOTH)
    assert Plan.from_json(made.to_json()) == made
    forward = made["forward"]
    assert forward == HeadsForward(BOTH, "sm_90a")
    assert forward.cost > 0
    assert rounds_alike(forward, made["backward"])
    assert not rounds_alike(forward, StripPass(BOTH, "sm_90a", "backward", "triton"))
    assert forward.alternatives(key(BOTH)) == [forward] == [forward.decided(key(BOTH), {"lowering": "heads"})]
    with pytest.raises(PlanError, match="is no candidate on sm_90a"):
        forward.decided(key(BOTH), {"lowering": "strip"})
    assert set(made.heads) == {"forward"}
    assert set(made.strip) == {"backward", "decode"}


@pytest.mark.parametrize(
    ("changed", "scale"), [({}, 1.0), ({"dtype": "fp16"}, 2.0**-8), ({"dtype": "fp16", "post_mixed_heads": None}, 1.0)]
)
def test_scale_of_probabilities(changed: dict[str, Any], scale: float) -> None:
    """Fp16 holds probabilities times the scale, but not sums of them with large factors."""
    outputs = OutputsKernel(replace(BOTH, **changed), "sm_90a")
    assert outputs.share_scale == scale
    assert outputs.share_scale * outputs.output_scale * PROBABILITY_SCALE == 1


@pytest.mark.parametrize(
    ("spec", "slots"), [(BOTH, 240), (replace(BOTH, causal=False), 120), (replace(BOTH, window=(300, -1)), 120)]
)
def test_blocks_from_which_on_keys_are_not_divided(spec: Spec, slots: int) -> None:
    """On 132 multiprocessors. Each block that sees all keys has the longest block's work."""
    assert {source.slots for source in HeadsForward(spec, "sm_90a").cuda.values()} == {slots}


@pytest.mark.parametrize(
    ("n_q", "n_k", "batch", "chunks", "parts"),
    [
        (2048, 2048, 1, 8, 4),
        (2048, 2048, 4, 2, 1),
        (4096, 4096, 1, 4, 2),
        (6144, 6144, 1, 3, 2),
        (8192, 8192, 1, 2, 1),
        (16384, 16384, 1, 1, 1),
        (512, 512, 2, 4, 4),
        (1, 100, 1, 1, 1),
        (1, 1000, 1, 7, 7),
    ],
)
def test_chunks_of_keys(n_q: int, n_k: int, batch: int, chunks: int, parts: int) -> None:
    """Enough that the longest takes about as long as a multiprocessor has work on average, of at least 128 keys."""
    made = mixed_on_chip(BOTH)
    module = ModuleType("heads")
    exec(compile(cuda.render_heads_host(made), "heads.py", "exec"), vars(module))
    sizes = {N_Q: n_q, N_K: n_k, BATCH: batch, HEADS: 16}
    planned = []
    for source in made.heads["forward"].cuda.values():
        blocks, keys = (int(size.subs(sizes)) for size in (source.blocks, source.visible_keys))
        planned.append(module._chunks(blocks, keys, source.slots, source.min_chunk))
        assert [int(extent.subs({**sizes, source.chunks: 3})) for extent in source.kernel.grid] == [3 * blocks]
    assert planned == [chunks, parts]


def test_keys_that_a_block_sees() -> None:
    """In a window, those of its rows alone count."""
    outputs = OutputsKernel(replace(BOTH, window=(300, -1)), "sm_90a")
    assert [outputs.visible_keys.subs({N_K: n}) for n in (100, 5000)] == [100, 332]


def test_host_modules() -> None:
    """The forward pass has a module of its own, which does not need Triton."""
    sources = render(mixed_on_chip(BOTH))
    assert sources.hosts["forward"].startswith("mta_heads_")
    assert sources.hosts["backward"].startswith("mta_strip_")
    assert "triton" not in sources.files[sources.hosts["forward"]]
    assert "def forward" not in sources.files[sources.hosts["backward"]]
    assert {*sources.kernels} >= {"statistics", "outputs"}
    assert "softmax" not in sources.kernels
    assert not [line for text in sources.files.values() for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    "spec",
    [
        BOTH,
        replace(BOTH, mixed_heads=None, dtype="fp16", causal=False),
        Spec(None, 48, 32, mixed_heads=13, window=(99, 9), causal=False),
    ],
    ids=["before and after", "after, full, fp16", "13 heads before, a window on both sides"],
)
def test_compiled(spec: Spec, log: Callable[[], str]) -> None:
    """Registers of all warps fill a multiprocessor, and hardly any lies on the stack."""
    for source in HeadsForward(spec, "sm_90a").cuda.values():
        usage = usage_of_cubins(compile_cubin(cuda.render(source), "sm_90a", source.name))
        assert not log()
        assert usage.keys() == {kernel.name for kernel in source.kernels}
        used = usage.pop(source.kernel.name)
        for kernel, other in zip(source.kernels[1:], usage.values(), strict=True):
            assert other.registers <= kernel.registers
            assert other.stack == 0
        warps = zip(source.warps, source.registers, strict=True)
        assert sum(32 * count * registers for count, registers in warps) <= SM90.registers_per_multiprocessor
        assert used.registers * source.kernel.threads <= SM90.registers_per_multiprocessor
        assert used.stack <= STACK
        assert source.kernel.shared + used.shared <= SM90.shared_per_block + 1024
        assert re.search(r"\bHMMA", used.assembly)
        assert re.search(r"\bUSETMAXREG", used.assembly)
