"""What the README shows works as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtagen import TARGETS
from mtagen.cli import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


SHELL = [command.strip() for block in blocks("sh") for command in re.split(r"&&|\n", block)]
COMMANDS = sorted({command for command in SHELL if command.startswith("mtagen ")})


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_example() -> None:
    names: dict[str, Any] = {}
    for example in blocks("python"):
        exec(example, names)
    q, weight, out, last = (names[name] for name in ("q", "weight", "out", "last"))
    assert out.shape == q.shape == q.grad.shape
    assert q.grad.isfinite().all()
    assert weight.grad.any()
    torch.testing.assert_close(last, out[:, :, -1:].detach())
    layer, x, generated = (names[name] for name in ("layer", "x", "generated"))
    torch.testing.assert_close(generated, layer(x))


def test_page_of_the_layer() -> None:
    """Its code, block after block, in one process."""
    names: dict[str, Any] = {}
    for example in blocks("python", (ROOT / "docs/layer.md").read_text(encoding="utf-8")):
        exec(example, names)
    heads, head_dim = names["heads"], names["head_dim"]
    assert names["out"].shape == (2, 100, heads * head_dim)
    assert names["packed"].shape == (100, heads * head_dim)
    assert names["first"].lengths.tolist() == [12]
    assert all(x.isfinite().all() for x in names["empty"].parameters())


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_target_is_named() -> None:
    (row,) = re.findall(r"^\| targets \|.*$", TEXT, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(TARGETS)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/mathematics.md",
        "docs/pipelines.md",
        "docs/layer.md",
        "docs/performance.md",
        "CONTRIBUTING.md",
        "generated/README.md",
        "benchmarks/README.md",
        "benchmarks/RESULTS.md",
        "CHANGELOG.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    for link in links:
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link.split("#")[0]).exists(), link
