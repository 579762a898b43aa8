"""Keys of the cache, of which a built op's is its identity, too: whatever kernels depend on changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from mtagen import Plan, Spec, plan
from mtagen.codegen import cuda as cuda_sources
from mtagen.codegen import render
from mtagen.codegen import triton as triton_sources
from mtagen.runtime import nvrtc
from mtagen.runtime.disk_cache import Cache
from mtagen.runtime.load import plan_key

SPEC = Spec((6, 11), 64)
BACKENDS = {"cuda": cuda_sources, "triton": triton_sources}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def key_of(made: Plan) -> str:
    return plan_key(made, render(made))


@every_backend
def test_equal_plans_have_one_key(backend: str) -> None:
    assert key_of(plan(SPEC, "sm_90a", backend)) == key_of(plan(Spec((6, 11), 64), "sm_90a", backend))


@every_backend
def test_other_sources_make_another_key(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may change while the plan stays the same; here it is the version that sources are headed with."""
    made = plan(SPEC, "sm_90a", backend)
    before = key_of(made)
    monkeypatch.setattr(BACKENDS[backend], "__version__", "another")
    assert key_of(made) != before


@pytest.mark.parametrize("package", [torch, triton], ids=lambda package: package.__name__)
def test_another_version_of_a_package_makes_another_key(package: object, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(SPEC, "sm_90a", "triton")
    before = key_of(made)
    monkeypatch.setattr(package, "__version__", "another")
    assert key_of(made) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda made: plan(made.spec, "sm_80", "triton"),
        lambda made: plan(made.spec, made.target, "auto"),
        lambda made: plan(replace(made.spec, value_head_dim=128), made.target, "triton"),
        lambda made: made.replaced(replace(made["backward"], workspace_bytes=2**20)),
        lambda made: made.replaced(replace(made["forward"], heads_per_section=2)),
        lambda made: made.replaced(made["forward"].alternatives(next(iter(made["forward"].decisions())))[-1]),
    ],
    ids=["target", "backend", "value head dim", "workspace", "heads of a section", "tile"],
)
def test_another_decision_makes_another_key(change: Callable[[Plan], Plan]) -> None:
    made = plan(SPEC, "sm_90a", "triton")
    assert key_of(change(made)) != key_of(made)


def test_other_options_of_the_compiler_make_another_cubin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: b"")
    for options in (nvrtc._OPTIONS, nvrtc._OPTIONS | {"lineinfo": False}):
        monkeypatch.setattr(nvrtc, "_OPTIONS", options)
        nvrtc.cached_cubin("source", "sm_80", "mta_any")
    assert len({entry.key for entry in Cache().entries()}) == 2
