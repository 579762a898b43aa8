"""Calls of "strip" by recipes, as on a GPU: CUDA's kernels on a CPU that plays the GPU, Triton's in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from emulator import load_emulated
from host_functions import retiled
from torch import Tensor

from mtagen import Plan, Spec, plan
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.runtime.load import load_host

ALL = Spec((2, 3), 16, dtype="fp16", mixed_heads=2, post_kernel=(2, 2), post_mixed_heads=4)
SPECS = {
    "all stages": ALL,
    "mixed after, in a window": Spec(None, 16, dtype="fp16", post_mixed_heads=4, window=(9, 0)),
    "pairs after a convolution": Spec((2, 3), 16, dtype="fp16", post_mixed_heads=2),
}
SIZES = (Sizes(2, 4, 4, 40, 40), Sizes(2, 4, 2, 37, 30))


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTAGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def loaded(spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch, workspace_bytes: int) -> ModuleType:
    """The module of a spec, whose calls on the CPU are made by recipes."""
    made: Plan = retiled(plan(spec, "sm_90a"), workspace_bytes=workspace_bytes)
    load_emulated(made, folder)
    module = load_host(made, render(made), "forward")
    monkeypatch.setattr(module, "RECIPES", module.Recipes())
    monkeypatch.setattr(module.Recipes, "serves", staticmethod(lambda x: True))
    return module


def step(module: ModuleType, spec: Spec, sizes: Sizes, seed: int) -> list[Tensor]:
    """Results and gradients of a call with random arguments."""
    sampler = Sampler(spec, sizes, torch.device("cpu"), torch.Generator().manual_seed(seed), seed % 2 == 0)
    inputs, grad_out = sampler.inputs(), sampler.outputs()
    weights = list(inputs.weights.values())
    out, lse = module.forward(inputs.q, inputs.k, inputs.v, *weights, 0.3)
    given = (inputs.q, inputs.k, inputs.v, *weights)
    return [out, lse, *module.backward(grad_out, torch.ones_like(lse), *given, out, lse, 0.3)]


@pytest.mark.parametrize("workspace_bytes", [2**30, 2**14], ids=["one strip", "many strips"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_same_bits(spec: Spec, workspace_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded(spec, folder, monkeypatch, workspace_bytes)
    for sizes in SIZES:
        for layout in (0, 1):
            with module.RECIPES.suspended():
                expected = [step(module, spec, sizes, seed) for seed in (layout, layout + 2, layout + 4)]
            for seed, results in enumerate(expected):
                made = step(module, spec, sizes, layout + 2 * seed)
                assert all(torch.equal(x, y) for x, y in zip(made, results, strict=True))
    assert len(module.RECIPES._recipes) == 2 * len(SIZES) * 2
