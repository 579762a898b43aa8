"""Triton's kernels of ``mtagen::append``, against the model of rings."""

from __future__ import annotations

import pytest
from rings import Engine

from mtagen.runtime.triton_package import serves


@pytest.mark.parametrize("spare", [0, 2])
def test_chunks_drafts_forks_and_shared_pages(spare: int) -> None:
    engine = Engine(8, spare)
    engine.begin()
    engine.begin()
    engine.step([13, 2], padding=2)
    engine.step([0, 1])
    engine.step([9, 1], hits=[0])
    engine.fork(1)
    engine.remove(0, engine.removable(0))
    engine.step([1, 4, 2, 3])
    engine.remove(1, engine.removable(1))
    engine.step([1, 2, 9, 1])
    assert serves(engine.k_pages)
