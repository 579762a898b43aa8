"""Parameters of logits and sinks in kernels of "strip", Triton's and CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import problems
import pytest
import torch
from emulator import load_emulated
from host_functions import retiled

from mtagen import Plan, Spec, plan
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import assemble
from mtagen.runtime.load import load_host

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

# Two bundles of heads, the last with heads that do not exist.
MIXTURES: dict[str, dict[str, Any]] = {
    "a mixture": {"kernel": None, "mixed_heads": 2},
    "all stages": {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 4},
    "pairs after": {"kernel": None, "post_mixed_heads": 2},
}
SLOPES: dict[str, Any] = {"logits": "s - slopes[h] * (i - j) / 16", "parameters": {"slopes": "h"}}
WHAT: dict[str, dict[str, Any]] = {
    "read": problems.READ,
    "a sink": {"sink": True},
    "both in a window": {**problems.READ, "sink": True, "window": (21, -1)},
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def planned(backend: str, folder: Path, **options: Any) -> Plan:
    made = retiled(plan(Spec(head_dim=16, dtype="fp16", **options), "sm_90a", backend), workspace_bytes=2**10)
    load_emulated(made, folder)
    return made


def host_of(made: Plan) -> Mapping[str, Callable[..., Any]]:
    sources = render(made)
    return {name: getattr(load_host(made, sources, name), name) for name in sources.hosts}


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("stages", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_all_passes(backend: str, stages: dict[str, Any], what: dict[str, Any], folder: Path) -> None:
    made = planned(backend, folder, **stages, **what)
    op = assemble(made, torch_on_cpu=False)
    several_strips = [Sizes(1, 4, 2, 131, 139)] if "sink" in what else []
    for sizes in (Sizes(2, 4, 2, 17, 19), *several_strips):
        assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, sizes))
    for new, lengths, splits in ((2, (140, 90), 2), (3, (2, 0), 1)):
        problem = problems.random(made.spec, Sizes(2, 4, 2, 1, 140), new_tokens=new)
        assert not problems.decode_failures(op, made.spec, problem, lengths, splits)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_decode_of_a_score_that_is_nan(backend: str, folder: Path) -> None:
    made = planned(backend, folder, **MIXTURES["pairs after"])
    problem = problems.random(made.spec, Sizes(2, 4, 2, 1, 140))
    inputs = problem.inputs
    inputs.k[0, 0, 3] = torch.nan
    options = inputs.options(inputs.named)
    _, lse = assemble(made, torch_on_cpu=False).decode(problem.q_tail, inputs.k, inputs.v, **options, return_lse=True)
    assert lse[0, :2].isnan().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("stages", [MIXTURES["pairs after"], {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2}])
def test_large_logits_of_heads_that_do_not_exist(backend: str, stages: dict[str, Any], folder: Path) -> None:
    """A tile of 16 heads has 4 that exist. exp(40) of the others is infinite in fp16, and mixtures multiply it by 0."""
    made = planned(backend, folder, **stages, logits="s + 40")
    op = assemble(made, torch_on_cpu=False)
    assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, Sizes(2, 4, 2, 17, 19)))
    problem = problems.random(made.spec, Sizes(2, 4, 2, 1, 140), new_tokens=2)
    assert not problems.decode_failures(op, made.spec, problem, (140, 90), 2)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("stages", MIXTURES.values(), ids=MIXTURES)
def test_documents(backend: str, stages: dict[str, Any], folder: Path) -> None:
    """A document without keys has its sink."""
    made = planned(backend, folder, packed=True, **stages, **WHAT["both in a window"])
    spec = replace(made.spec, packed=False)
    longest = (
        (140, 170) if "mixed_heads" in stages and len(stages) == 2 else (30, 40)
    )  # more than a tile takes a minute
    assert not documents.failures(host_of(made), spec, ((9, 4), longest, (5, 0), (5, 60)), 4, 2)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_rows_behind_the_last_document(backend: str, folder: Path) -> None:
    """They have no sink, though their gradients hold NaN."""
    made = planned(backend, folder, packed=True, kernel=None, mixed_heads=2, sink=True, **SLOPES)
    host = documents.with_rest(host_of(made), 140, 70)
    assert not documents.failures(host, replace(made.spec, packed=False), ((9, 20), (0, 2), (30, 12)), 4, 2)
