"""What the README shows works as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from pages import ROOT, commands, execute, page, prose
from typer.testing import CliRunner

from mtagen import TARGETS
from mtagen.cli import app

TEXT = page("README.md")
COMMANDS = sorted({shlex.join(words) for words in commands("README.md") if words[0] == "mtagen"})


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_example() -> None:
    names = execute("README.md")
    q, weight, out, last = (names[name] for name in ("q", "weight", "out", "last"))
    assert out.shape == q.shape == q.grad.shape
    assert q.grad.isfinite().all()
    assert weight.grad.any()
    torch.testing.assert_close(last, out[:, :, -1:].detach())


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_target_is_named() -> None:
    (row,) = re.findall(r"^\| targets \|.*$", TEXT, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(TARGETS)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
        "CONTRIBUTING.md",
        "SECURITY.md",
        "generated/README.md",
        "integrations/vllm/README.md",
        "benchmarks/README.md",
        "benchmarks/RESULTS.md",
        "benchmarks/NOTES.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks/notes").glob("*.md")),
        "CHANGELOG.md",
    ],
)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        assert link.startswith("https://") or (ROOT / name).parent.joinpath(link.split("#")[0]).exists(), link
