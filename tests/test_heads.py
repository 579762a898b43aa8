"""Plans of the lowering "heads", and its kernels as CUDA's compiler makes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mtagen import Plan, Spec, plan
from mtagen.codegen import cuda, render
from mtagen.errors import PlanError
from mtagen.planner import get_target
from mtagen.planner.choice import candidates
from mtagen.planner.heads.passes import HeadsForward, why_not
from mtagen.planner.passes import rounds_alike
from mtagen.planner.strip.passes import StripPass
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
        ({"mixed_heads": 4, "head_dim": 32, "value_head_dim": 48}, ""),
        ({"mixed_heads": None, "post_mixed_heads": None}, "no heads mix"),
        ({"kernel": (6, 11)}, "kernels that mix heads on the chip lack kernel"),
        ({"packed": True, "dropout": True}, "kernels that mix heads on the chip lack packed, dropout"),
        ({"logits": "s / 2", "sink": True}, "kernels that mix heads on the chip lack logits, sink"),
        ({"mixed_heads": 20, "post_mixed_heads": None}, "at most 16 heads mix with each other on the chip"),
        ({"mixed_heads": 3}, "at most 16 heads mix with each other on the chip"),
        ({"head_dim": 128, "value_head_dim": None}, "heads mix on the chip at head dims up to 64 in multiples of 16"),
        ({"value_head_dim": 24}, "heads mix on the chip at head dims up to 64 in multiples of 16"),
        ({"dtype": "fp32"}, "heads mix on the chip in bf16 and fp16 on sm_90a"),
        ({"mixed_heads": 2, "post_mixed_heads": 8}, "mixing heads on the chip would take 1.4 of the time"),
    ],
)
def test_which_specs_mix_on_the_chip(changed: dict[str, Any], reason: str) -> None:
    spec = replace(BOTH, **changed)
    assert why_not(spec, SM90).startswith(reason) and bool(reason) == bool(why_not(spec, SM90))
    if spec.mixed and spec.dtype != "fp32":
        made = plan(spec, "sm_90a", "cuda")
        assert made["forward"].lowering == ("strip" if reason else "heads")
        assert f"strip: {reason}" in str(made) if reason else "heads: the only stages mix heads" in str(made)
        assert {one.plan.lowering for one in made.passes[1:]} == {"strip"}


def test_other_targets_have_strips() -> None:
    assert why_not(BOTH, get_target("sm_80")) == "heads mix on the chip in bf16 and fp16 on sm_90a"
    assert plan(BOTH, "sm_80", "cuda")["forward"].lowering == "strip"
    assert plan(BOTH, "sm_90a", "triton")["forward"].lowering == "strip"


def test_refusals_are_those_of_strips() -> None:
    with pytest.raises(PlanError, match="the cuda backend supports 16-bit dtypes only"):
        candidates("cuda", "forward", replace(BOTH, dtype="fp32"), SM90)


def test_plan() -> None:
    made = plan(BOTH, "sm_90a")
    assert Plan.from_json(made.to_json()) == made
    forward, strips = made["forward"], StripPass(BOTH, "sm_90a", "forward", "cuda")
    assert forward == HeadsForward(BOTH, "sm_90a") and forward.cost < strips.cost
    assert rounds_alike(forward, made["backward"])
    assert not rounds_alike(forward, StripPass(BOTH, "sm_90a", "backward", "triton"))
    assert made["forward"].decisions() == {}
    assert set(made.heads) == {"forward"} and set(made.strip) == {"backward", "decode"}


def test_host_modules() -> None:
    """The forward pass has a module of its own, which does not need Triton."""
    sources = render(plan(BOTH, "sm_90a"))
    assert sources.hosts["forward"].startswith("mta_heads_") and sources.hosts["backward"].startswith("mta_strip_")
    assert "triton" not in sources.files[sources.hosts["forward"]]
    assert "def forward" not in sources.files[sources.hosts["backward"]]
    assert {*sources.kernels} >= {"statistics", "outputs"} and "softmax" not in sources.kernels


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
        ((name, used),) = usage_of_cubins(compile_cubin(cuda.render(source), "sm_90a", source.name)).items()
        assert not log()
        assert name == source.kernel.name
        warps = zip(source.warps, source.registers, strict=True)
        assert sum(32 * count * registers for count, registers in warps) <= SM90.registers_per_multiprocessor
        assert used.registers * source.kernel.threads <= SM90.registers_per_multiprocessor
        assert used.stack <= STACK
        assert source.kernel.shared + used.shared <= SM90.shared_per_block + 1024
        assert re.search(r"\bHMMA", used.assembly) and re.search(r"\bUSETMAXREG", used.assembly)
