"""Logits other than the scores, in kernels of "lift" and "strip", Triton's and CUDA's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import problems
import pytest
from emulator import load_emulated
from host_functions import retiled

from mtagen import Plan, Spec, plan
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import assemble
from mtagen.planner.strip.kernels import SECTION
from mtagen.runtime.load import load_host

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the backend and the stages
    "a convolution": ("triton", {"kernel": (6, 11)}),
    "a convolution in a window": ("triton", {"kernel": (3, 4), "window": (20, -1)}),
    "plain": ("triton", {"kernel": None}),
}
for _backend in ("triton", "cuda"):
    CASES |= {
        f"a mixture, {_backend}": (_backend, {"kernel": None, "mixed_heads": 2}),
        f"all stages, {_backend}": (
            _backend,
            {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 4},
        ),
    }


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("backend", "stages"), CASES.values(), ids=CASES)
def test_all_passes(backend: str, stages: dict[str, Any], folder: Path) -> None:
    """Gradients come through the log-sum-exp, too, which shows the function itself."""
    made = plan(Spec(head_dim=16, dtype="fp16", logits=problems.LOGITS, **stages), "sm_90a", backend)
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    for sizes in (Sizes(2, 4, 2, 17, 17), Sizes(1, 4, 1, 13, 140)):
        assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, sizes))
    problem = problems.random(made.spec, Sizes(2, 4, 2, 1, 140), new_tokens=3)
    assert not problems.decode_failures(op, made.spec, problem, (140, 30), None)


SECTIONS: dict[str, dict[str, Any]] = {
    "pairs": {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2, "sink": True},
    "all stages in a window": {
        "kernel": (2, 3),
        "mixed_heads": 2,
        "post_kernel": (2, 2),
        "post_mixed_heads": 2,
        "window": (SECTION + 900, -1),
    },
}


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("stages", SECTIONS.values(), ids=SECTIONS)
def test_sections_of_a_decode_step(stages: dict[str, Any], backend: str, folder: Path) -> None:
    """Programs divide rows; each knows the places of its keys, and merges the sums of all."""
    made = plan(Spec(head_dim=16, dtype="fp16", logits="s + (j - i) / 2000", **stages), "sm_90a", backend)
    load_emulated(made, folder)
    op, keys = assemble(made, torch_on_cpu=False), 2 * SECTION + 300
    problem = problems.random(made.spec, Sizes(2, 2, 2, 1, keys), new_tokens=2)
    assert not problems.decode_failures(op, made.spec, problem, (keys, SECTION + 1), None)


# Loops, planes and workspaces begin with the first key that a window shows.
IN_A_WINDOW: dict[str, tuple[str, dict[str, Any]]] = {
    "lift": ("triton", {"kernel": (3, 4)}),
    "tile": ("cuda", {"kernel": (3, 4)}),
    "strip, triton": ("triton", {"kernel": None, "post_kernel": (2, 2)}),
    "strip, cuda": ("cuda", {"kernel": None, "mixed_heads": 2}),
    "strip with a separate mixture, cuda": ("cuda", {"kernel": None, "post_kernel": (2, 2), "post_mixed_heads": 2}),
}


def in_a_window(backend: str, stages: dict[str, Any], folder: Path, **options: Any) -> Plan:
    spec = Spec(head_dim=16, dtype="fp16", logits=problems.OF_PLACES, window=(21, -1), **stages, **options)
    made = retiled(plan(spec, "sm_90a", backend), workspace_bytes=2**10)
    load_emulated(made, folder)
    return made


@pytest.mark.parametrize(("backend", "stages"), IN_A_WINDOW.values(), ids=IN_A_WINDOW)
def test_places_in_a_window(backend: str, stages: dict[str, Any], folder: Path) -> None:
    """Positions and keys count from the sequence's first key, wherever strips and splits begin."""
    made = in_a_window(backend, stages, folder)
    op = assemble(made, torch_on_cpu=False)
    assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, Sizes(1, 2, 1, 131, 139)))
    problem = problems.random(made.spec, Sizes(2, 2, 1, 1, 140), new_tokens=2)
    assert not problems.decode_failures(op, made.spec, problem, (140, 90), 2)


@pytest.mark.parametrize(("backend", "stages"), IN_A_WINDOW.values(), ids=IN_A_WINDOW)
def test_places_in_documents(backend: str, stages: dict[str, Any], folder: Path) -> None:
    """Positions and keys count from the document's first key."""
    made = in_a_window(backend, stages, folder, packed=True)
    sources = render(made)
    host = {name: getattr(load_host(made, sources, name), name) for name in sources.hosts}
    assert not documents.failures(host, replace(made.spec, packed=False), ((9, 4), (140, 170), (5, 60)), 2, 1)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize(
    "stages", [{"kernel": (3, 4)}, {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5)}], ids=str
)
def test_hidden_slopes_reach_nothing(backend: str, stages: dict[str, Any], folder: Path) -> None:
    made = plan(Spec(head_dim=16, dtype="fp16", logits=problems.DEFINED_WHERE_VISIBLE, **stages), "sm_90a", backend)
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, Sizes(2, 4, 2, 33, 40)))
