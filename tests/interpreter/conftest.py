"""All tests of this folder run in an interpreter that takes less time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lean_interpreter import lean_interpreter


@pytest.fixture(autouse=True, scope="session")
def lean() -> Iterator[None]:
    with lean_interpreter():
        yield
