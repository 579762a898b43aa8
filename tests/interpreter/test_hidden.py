"""Triton's kernels: what the mask hides changes no bit of a result that does not depend on it."""

from __future__ import annotations

import itertools
from typing import Any

import hidden
import pytest
from hidden import PIPELINES, WINDOWS

import mtagen

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")
STAGES = {name: PIPELINES[name] for name in ("convolution", "convolution of more queries than keys", "output", "all")}
CASES = {
    f"{stages}, {window}": (PIPELINES[stages], WINDOWS[window])
    for stages, window in (
        *itertools.product([name for name in STAGES if name != "all"], ("causal", "sliding")),
        ("all", "sliding"),  # both edges
        ("convolution", "later edge"),
        ("convolution", "narrow"),
        ("plain", "both edges"),
        ("output", "both edges"),
        ("slopes before", "causal"),
        ("slopes before", "both edges"),
        ("pairs after", "causal"),
    )
}


@pytest.mark.parametrize(("stages", "window"), CASES.values(), ids=CASES)
def test_training(stages: dict[str, Any], window: dict[str, Any]) -> None:
    op = mtagen.build(head_dim=16, dtype="fp32", backend="triton", **stages, **window)
    assert not hidden.training_failures(op, 70, 75, 50)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # scores that overflow, as meant
def test_training_with_planes_that_overflow() -> None:
    op = mtagen.build(head_dim=16, dtype="fp16", backend="triton", **PIPELINES["mixed"], **WINDOWS["sliding"])
    assert not hidden.training_failures(op, 70, 75, 50)


@pytest.mark.parametrize(("stages", "window"), CASES.values(), ids=CASES)
def test_decode(stages: dict[str, Any], window: dict[str, Any]) -> None:
    op = mtagen.build(head_dim=16, dtype="fp32", backend="triton", **stages, **window)
    assert not hidden.decode_failures(op, 60, 50, 2)


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_documents(stages: dict[str, Any]) -> None:
    op = mtagen.build(head_dim=16, dtype="fp32", backend="triton", packed=True, **stages)
    assert not hidden.document_failures(op)
