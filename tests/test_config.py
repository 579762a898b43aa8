"""Environment variables and the environment report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtagen.config import Config
from mtagen.environment import collect
from mtagen.errors import SpecError

VARIABLES = (
    "MTAGEN_CACHE_DIR",
    "XDG_CACHE_HOME",
    "MTAGEN_CACHE_LOCK_TIMEOUT",
    "MTAGEN_CHECK_VALUES",
    "MTAGEN_SHORTCUTS",
    "TRITON_INTERPRET",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_defaults(tmp_path: Path) -> None:
    switches = {"check_values": False, "shortcuts": True, "triton_interpret": False}
    assert Config.from_env() == Config(tmp_path / ".cache" / "mtagen", 600.0, **switches)


def test_cache_dir_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert Config.from_env().cache_dir == tmp_path / ".cache" / "mtagen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Config.from_env().cache_dir == tmp_path / "xdg" / "mtagen"
    monkeypatch.setenv("MTAGEN_CACHE_DIR", "~/mine")
    assert Config.from_env().cache_dir == tmp_path / "mine"
    monkeypatch.setenv("MTAGEN_CACHE_DIR", "")
    assert Config.from_env().cache_dir == tmp_path / "xdg" / "mtagen"


@pytest.mark.parametrize("home", [None, "relative"])
def test_a_user_without_a_home_is_told_to_name_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    if home is None:
        pwd = pytest.importorskip("pwd")
        monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(
        SpecError, match=r"MTAGEN_CACHE_DIR: got None; is not set, and the home directory, .* is unknown"
    ):
        Config.from_env()
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    assert Config.from_env().cache_dir == tmp_path


@pytest.mark.parametrize("bad", ["soon", "-1", "nan"])
def test_bad_timeout_is_explained(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_LOCK_TIMEOUT", bad)
    with pytest.raises(SpecError, match=f"MTAGEN_CACHE_LOCK_TIMEOUT: got '{bad}'"):
        Config.from_env()


def test_an_empty_switch_is_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTAGEN_SHORTCUTS", "")
    assert Config.from_env().shortcuts
    monkeypatch.setenv("MTAGEN_SHORTCUTS", "false")
    assert not Config.from_env().shortcuts


def test_describe_shows_values_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("MTAGEN_CACHE_LOCK_TIMEOUT", "2.5")
    monkeypatch.setenv("MTAGEN_CHECK_VALUES", "1")
    monkeypatch.setenv("MTAGEN_SHORTCUTS", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = {row.name: row for row in Config.from_env().describe()}
    assert {name: row.value for name, row in rows.items()} == {
        "MTAGEN_CACHE_DIR": str(tmp_path / "here"),
        "MTAGEN_CACHE_LOCK_TIMEOUT": "2.5",
        "MTAGEN_CHECK_VALUES": "1",
        "MTAGEN_SHORTCUTS": "0",
        "TRITON_INTERPRET": "1",
    }
    assert rows["MTAGEN_CACHE_LOCK_TIMEOUT"].default == "600"
    assert all(row.meaning for row in rows.values())


def test_collect_is_json_and_complete(tmp_path: Path) -> None:
    facts = collect()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["mtagen"]
    assert facts["torch"]
    assert facts["cache_dir"] == str(tmp_path / ".cache" / "mtagen")
    assert isinstance(facts["gpus"], list)
