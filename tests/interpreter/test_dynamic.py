"""Strips of mixings that depend on tokens: Triton's kernels in the interpreter, CUDA's on a CPU that plays the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dropping
import problems
import pytest
import torch
from emulator import load_emulated
from host_functions import retiled

import mtagen
from mtagen import Plan, PlanError, Spec, plan
from mtagen.check import failures
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.runtime.load import load_host

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

EVERYTHING: dict[str, Any] = {
    "kernel": (3, 4),
    "mixed_heads": 4,
    "post_kernel": (2, 5),
    "post_mixed_heads": 2,
    "dynamic_ranks": (2, 1),
    "post_dynamic_ranks": (1, 2),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "before": {"kernel": None, "mixed_heads": 4, "dynamic_ranks": (1, 2)},
    "after": {"kernel": None, "post_mixed_heads": 3, "post_dynamic_ranks": (0, 1)},
    "queries alone, then all heads": {
        "kernel": None,
        "mixed_heads": 2,
        "dynamic_ranks": (2, 0),
        "post_mixed_heads": 6,
        "sink": True,
        "logits": "s - abs(i - j) / 16",
        "causal": False,
    },
    "all stages in a window": EVERYTHING | {"window": (9, 3), "causal": False, "mask": "output"},
    "all stages, a mask in tables": EVERYTHING | {"visible": "(j < 4) | (i - j < 11)"},
}


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTAGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def planned(options: dict[str, Any], backend: Any = "triton", target: str = "generic", **others: Any) -> Plan:
    given = {"head_dim": 16, "value_head_dim": 24, "dtype": "fp32"} | options | others
    return plan(Spec(**given), target, backend)


def assert_accurate(op: AttentionOp, *sizes: Sizes) -> None:
    assert not failures(op, op.plan.spec, torch.device("cpu"), sizes)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_triton(options: dict[str, Any]) -> None:
    """All gradients, and a decode step; several blocks of keys, grouped keys, more queries than keys, one of each."""
    heads = 6 if 3 in options.values() or 6 in options.values() else 4
    op = assemble(planned(options), torch_on_cpu=False)
    assert_accurate(op, Sizes(1, heads, heads // 2, 7, 40), Sizes(2, heads, heads, 1, 1))
    if "visible" not in options:
        assert_accurate(op, Sizes(1, heads, heads, 9, 4))


def test_triton_in_strips_of_some_rows() -> None:
    """The second strip has rows of the first as context, and chunks of rows have sums of their own."""
    op = assemble(retiled(planned(EVERYTHING, post_mixed_heads=4), workspace_bytes=2**10), torch_on_cpu=False)
    assert_accurate(op, Sizes(1, 4, 2, 130, 33))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_triton_in_fp16(target: str) -> None:
    """20 heads of a group are more than a tile of 16."""
    stages = {"kernel": None, "mixed_heads": 20, "dynamic_ranks": (1, 1), "post_mixed_heads": 2}
    op = assemble(planned(stages, target=target, dtype="fp16"), torch_on_cpu=False)
    assert_accurate(op, Sizes(1, 20, 10, 9, 40))


def test_dropout() -> None:
    """It follows the mixing after the softmax."""
    stages = {"kernel": None, "post_mixed_heads": 4, "post_dynamic_ranks": (1, 1)}
    op = mtagen.build(**stages, head_dim=16, dtype="fp32", target="generic", backend="triton", dropout=True)
    dropping.assert_masks(op, op.plan.spec, 4, 5, 13, 0.5)
    assert not problems.failures(op, op.plan.spec, problems.random(op.plan.spec, Sizes(1, 4, 2, 5, 37)), 0.5)


MIXED: dict[str, Any] = {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16, "dtype": "fp16"}
ON_CUDA: dict[str, dict[str, Any]] = {
    "both": MIXED | {"dynamic_ranks": (2, 2), "post_dynamic_ranks": (1, 2)},
    "before, in a window": MIXED | {"dynamic_ranks": (2, 1), "window": (40, 3), "causal": False},
}


@pytest.mark.parametrize("options", ON_CUDA.values(), ids=ON_CUDA)
def test_cuda(options: dict[str, Any], folder: Path) -> None:
    made = planned(options, "cuda", "sm_90a", value_head_dim=16)
    assert "mix_backward" in made.strip["backward"].cuda
    load_emulated(made, folder)
    assert_accurate(assemble(made, torch_on_cpu=False), Sizes(1, 16, 8, 11, 70))


def test_gradients_are_reproducible() -> None:
    op = assemble(planned(VARIANTS["before"]), torch_on_cpu=False)
    inputs = problems.random(op.plan.spec, Sizes(2, 4, 2, 5, 40)).inputs
    named = {name: x.requires_grad_() for name, x in inputs.named.items()}
    first, second = (torch.autograd.grad(op(**named).sum(), [*named.values()]) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_what_kernels_lack_is_refused() -> None:
    before: dict[str, Any] = {"kernel": None, "mixed_heads": 4, "dynamic_ranks": (1, 1)}
    with pytest.raises(PlanError, match=r"convolved.*depends on tokens"):
        planned(before | {"convolved": "tanh(s)"})
    with pytest.raises(PlanError, match="at most 32 heads"):
        planned(before | {"mixed_heads": 33})


def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by recipes have the bits of calls launch by launch, and no gradient keeps memory of the call."""
    options = EVERYTHING | {"logits": "s + bias[b, h, i, j]", "parameters": {"bias": "b,h,i,j"}, "sink": True}
    op = assemble(planned(options), torch_on_cpu=False)
    module = load_host(op.plan, render(op.plan), "forward")
    recipes = module.Recipes()
    monkeypatch.setattr(module, "RECIPES", recipes)
    monkeypatch.setattr(recipes, "serves", lambda x: True)

    def gradients(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sampler = Sampler(op.plan.spec, Sizes(1, 4, 2, 9, 13), torch.device("cpu"), generator, rows_outside_heads=False)
        named = {name: x.requires_grad_() for name, x in sampler.inputs().named.items()}
        options = {name: x for name, x in named.items() if name != "bias"} | {"parameters": {"bias": named["bias"]}}
        return [*torch.autograd.grad(op(**options).square().sum(), [*named.values()])]

    with recipes.suspended():
        expected = [gradients(seed) for seed in range(3)]
    for seed, results in enumerate(expected):
        for got, rule in zip(gradients(seed), results, strict=True):
            assert torch.equal(got, rule)
            assert got.untyped_storage().nbytes() == rule.untyped_storage().nbytes()
    assert len(recipes._recipes) == 2
