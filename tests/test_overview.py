"""The picture at the head of the README is what its script draws, and shows the paper's window."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def overview(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import overview

    return overview


def test_picture_is_current(overview: Any) -> None:
    assert overview.PICTURE.read_text(encoding="utf-8") == overview.picture(), "run python docs/overview.py"


def test_window_has_the_extents_of_the_papers_kernel(overview: Any) -> None:
    i, j = overview.OUT
    cells = overview.window(i, j)
    assert len(cells) == 6 * 11
    assert cells[0] == (i - 5, j - 5)
    assert cells[-1] == (i, j + 5)
    assert all(0 <= place < overview.N for cell in cells for place in cell)


def test_every_hidden_score_of_the_window_is_a_zero(overview: Any) -> None:
    zeros = overview.picture().count('class="zero"')
    assert zeros == sum(column > row for row, column in overview.window(*overview.OUT)) > 0


def test_each_matrix_shows_the_causal_triangle(overview: Any) -> None:
    n = overview.N
    assert overview.picture().count('class="cell"') == 4 * n * (n + 1) // 2


def test_colours_are_those_of_the_reader(overview: Any) -> None:
    """Each class that has a colour has another one in the dark."""
    tree = ElementTree.fromstring(overview.picture())
    style = tree.find("{http://www.w3.org/2000/svg}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for colour in set(re.findall(r"#\w{6}", light)):
        assert colour not in dark
    assert light.count("#") == dark.count("#")
