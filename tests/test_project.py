"""Files about the project agree with the package: citation, version, bug reports, the tutorial's notebook."""

from __future__ import annotations

import re

import pytest
import typer
from pages import ROOT, page

import mtagen
from mtagen.cli import app

yaml = pytest.importorskip("yaml")


def test_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load(page("CITATION.cff"))
    version, date = re.findall(r"^## \[(\d\S*)\] - (\S+)$", page("CHANGELOG.md"), flags=re.MULTILINE)[0]
    assert citation["version"] == version == mtagen.__version__
    assert str(citation["date-released"]) == date
    (bibtex,) = re.findall(r"^```bibtex\n(.*?)^```", page("docs/index.md"), flags=re.MULTILINE | re.DOTALL)
    assert f"version = {{{version}}}" in bibtex
    assert f"year    = {{{date[:4]}}}" in bibtex
    (paper,) = citation["references"]
    assert paper["title"] in bibtex
    assert all(f"{author['family-names']}, {author['given-names']}" in bibtex for author in paper["authors"])


def test_every_release_names_its_tag_and_commit() -> None:
    text = page("CHANGELOG.md")
    for version in re.findall(r"^## \[(\d\S*)\] - ", text, flags=re.MULTILINE):
        assert re.search(rf"^Tag `v{re.escape(version)}`, commit `[0-9a-f]{{7,}}`\.$", text, flags=re.MULTILINE)


def test_bug_reports_ask_for_commands_that_exist() -> None:
    form = yaml.safe_load(page(".github/ISSUE_TEMPLATE/bug.yml"))
    text = " ".join(field["attributes"].get("description", "") for field in form["body"])
    asked = set(re.findall(r"`mtagen ([\w-]+)`", text))
    assert "collect-env" in asked
    assert asked <= typer.main.get_group(app).commands.keys()
    assert len({field.get("id") for field in form["body"]}) == len(form["body"])


def test_notebook_is_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code runs, because that of the page does."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import notebook

    assert page("docs/tutorial.ipynb") == notebook.notebook(page("docs/tutorial.md")), "run python docs/notebook.py"
