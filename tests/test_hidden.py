"""PyTorch ops: what the mask hides changes no bit of a result that does not depend on it."""

from __future__ import annotations

from typing import Any

import hidden
import pytest
from hidden import PIPELINES, WINDOWS

import mtagen

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_training(window: dict[str, Any], stages: dict[str, Any]) -> None:
    op = mtagen.build(head_dim=16, dtype="fp32", backend="torch", **stages, **window)
    assert not hidden.training_failures(op, 300, 310, 280)


@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_decode(window: dict[str, Any], stages: dict[str, Any]) -> None:
    op = mtagen.build(head_dim=16, dtype="fp32", backend="torch", **stages, **window)
    assert not hidden.decode_failures(op, 60, 50, 3)


@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
def test_documents(stages: dict[str, Any]) -> None:
    op = mtagen.build(head_dim=16, dtype="fp32", backend="torch", packed=True, **stages)
    assert not hidden.document_failures(op)
