"""Tests in ``interpreter/`` need TRITON_INTERPRET=1 before triton is imported; ``test_interpreter.py`` runs them so."""

import os

import pytest

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that parallel workers end together."""
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")
