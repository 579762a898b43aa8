"""Tests in ``interpreter/`` need TRITON_INTERPRET=1 before triton is imported; ``test_interpreter.py`` runs them so."""

import os
from collections import Counter

import jinja2
import pytest

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that parallel workers end together."""
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> "Counter[str]":
    """How often each template was rendered since the test began, by its name."""
    counts: Counter[str] = Counter()
    render = jinja2.Template.render

    def counting(self: jinja2.Template, *arguments: object, **values: object) -> str:
        counts[self.name or ""] += 1
        return render(self, *arguments, **values)

    monkeypatch.setattr(jinja2.Template, "render", counting)
    return counts
