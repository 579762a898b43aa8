"""The list of mutants fits the code as it is, and the command that tries them tells killed from survived."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mutation.__main__ import (
    BROKEN,
    DOES_NOT_APPLY,
    KILLED,
    SURVIVED,
    TOO_SLOW,
    Outcome,
    copy_of_tree,
    main,
    try_all,
    try_one,
)
from mutation.mutant import Mutant
from mutation.mutants import MUTANTS

ROOT = Path(__file__).parent.parent


def test_names_are_of_one_mutant_each() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(re.fullmatch(r"[a-z0-9-]+", mutant.name) for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    """What it replaces is in its file, once, and the tests that kill it are there."""
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.harm.endswith(".")
    assert mutant.killed_by
    for test in mutant.killed_by:
        file, *name = test.split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name[0].partition('[')[0]}(" in source


# The command, on a tree of two files.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "tests").mkdir(parents=True)
    (folder / "double.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "tests/test_double.py").write_text(
        "from double import double\n\n\ndef test_two() -> None:\n    assert double(2) == 4\n"
    )
    return folder


def mutant(old: str = "2 * x", new: str = "3 * x", test: str = "tests/test_double.py::test_two") -> Mutant:
    return Mutant("name", "double.py", old, new, "It is wrong.", (test,))


@pytest.mark.parametrize(
    ("one", "verdict", "detail"),
    [
        (mutant(), KILLED, "tests/test_double.py::test_two"),
        (mutant(new="x * x"), SURVIVED, ""),
        (mutant(old="4 * x"), DOES_NOT_APPLY, "'4 * x' is there 0 times"),
        (mutant(old="double", new="twice"), BROKEN, "ImportError"),
        (mutant(old="x"), DOES_NOT_APPLY, "'x' is there 2 times"),
        (mutant(test="tests/test_double.py::test_three"), BROKEN, "not found"),
    ],
)
def test_verdicts(tree: Path, one: Mutant, verdict: str, detail: str) -> None:
    before = (tree / "double.py").read_text()
    outcome = try_one(tree, one, timeout=60)
    assert outcome.verdict == verdict
    assert detail in outcome.detail
    assert (tree / "double.py").read_text() == before


def test_a_mutant_that_hangs_is_stopped(tree: Path) -> None:
    assert try_one(tree, mutant(new="double(x) if __import__('time').sleep(60) else 0"), timeout=2).verdict == TOO_SLOW


@pytest.mark.parametrize(
    ("verdicts", "status", "summary"),
    [
        ((SURVIVED, KILLED, KILLED), 0, "2 of 2 killed"),  # first the tree without a mutant, whose tests pass
        ((SURVIVED, KILLED, SURVIVED), 1, "1 of 2 killed"),
        ((SURVIVED, TOO_SLOW, KILLED), 1, "1 of 2 killed"),
        ((KILLED, KILLED, KILLED), 1, "the tests fail without a mutant"),  # which therefore kill nothing
    ],
)
def test_exit_status(
    tree: Path,
    verdicts: tuple[str, ...],
    status: int,
    summary: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = map(Outcome, verdicts)
    monkeypatch.setattr("mutation.__main__.run_tests", lambda *_: next(outcomes))
    assert try_all(tree, [mutant(), mutant()], timeout=60) == status
    assert summary in capsys.readouterr().out


def test_chosen_by_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", MUTANTS[0].name]) == 0
    assert capsys.readouterr().out == f"{MUTANTS[0].name}: {MUTANTS[0].harm}\n"
    assert main(["--list", "decode-*", "key-*"]) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [one.name for one in MUTANTS if one.name.startswith(("decode-", "key-"))]
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-mutant"])
    assert stopped.value.code == 2


def test_the_copy_is_of_the_working_tree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "kept").mkdir(parents=True)
    for name, text in {".gitignore": "ignored\n", "kept/a": "a", "gone": "", "ignored": ""}.items():
        (root / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=root, check=True)
    (root / "gone").unlink()
    (root / "kept/a").write_text("changed")
    (root / "kept/new").write_text("new")
    copy = copy_of_tree(root, tmp_path / "copy")
    files = {str(path.relative_to(copy)): path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert files == {".gitignore": "ignored\n", "kept/a": "changed", "kept/new": "new"}
