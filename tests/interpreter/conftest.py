"""All tests of this folder run in an interpreter that takes less time; those of the sweep, only if asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from lean_interpreter import lean_interpreter
from swept import SWEPT


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = defaultdict(set)
    for item in items:
        names[item.path.name].add(item.name)
        if item.name in SWEPT.get(item.path.name, ()):
            item.add_marker(pytest.mark.sweep)
    if not any("::" in argument for argument in config.args):
        missing = {file: SWEPT[file] - found for file, found in names.items() if SWEPT.get(file, set()) - found}
        assert not missing, f"tests of the sweep that do not exist: {missing}"


@pytest.fixture(autouse=True, scope="session")
def lean() -> Iterator[None]:
    with lean_interpreter():
        yield
