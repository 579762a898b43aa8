"""CONTRIBUTING names the tests of every template and planner file, and commands that work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest
from mutation.mutants import MUTANTS
from pages import ROOT, commands, page
from quick import QUICK

PAGE = page("CONTRIBUTING.md")
PACKAGE = ROOT / "mtagen"
FILES = sorted(
    path.relative_to(PACKAGE).as_posix()
    for folder in ("templates", "planner")
    for path in (PACKAGE / folder).rglob("*.*")
    if path.suffix != ".pyc"
)


def rows() -> Iterator[tuple[list[str], list[str]]]:
    """Patterns of files and the tests of each row of the table."""
    section = PAGE.partition("## Which tests\n")[2].partition("\n## ")[0]
    for files, tests in re.findall(r"^\| (`.*`) \| (`.*`) \|$", section, flags=re.MULTILINE):
        yield re.findall(r"`(.+?)`", files), re.findall(r"`(.+?)`", tests)


def named_for(file: str) -> set[str]:
    """The tests that the table names for a file."""
    return {test for patterns, tests in rows() if any(matches(file, one) for one in patterns) for test in tests}


def matches(file: str, pattern: str) -> bool:
    """Whether a path is meant; a star stands for names without folders."""
    return file.count("/") == pattern.count("/") and fnmatch(file, pattern)


@pytest.mark.parametrize("file", FILES)
def test_every_file_has_tests(file: str) -> None:
    """Those that kill its mutants are among them."""
    killers = {
        test.partition("::")[0].removeprefix("tests/")
        for mutant in MUTANTS
        if mutant.file == f"mtagen/{file}"
        for test in mutant.killed_by
    }
    assert named_for(file) >= killers
    assert named_for(file) - {"test_generated.py", "test_interpreter.py"}


def test_every_name_in_the_table_exists() -> None:
    for patterns, tests in rows():
        assert all(any(matches(file, one) for file in FILES) for one in patterns), patterns
        assert all((ROOT / "tests" / test).is_file() for test in tests), tests


def test_every_test_that_commands_select_exists() -> None:
    for words in commands("CONTRIBUTING.md"):
        for file in (word for word in words if word.startswith("tests/")):
            names = re.findall(r"^def (test_\w+)", page(file), flags=re.MULTILINE)
            selected = words[words.index("-k") + 1].split()[0]
            assert any(selected in name for name in names), words


def test_the_function_to_rename_is_in_templates_and_emitted_kernels() -> None:
    (name,) = set(re.findall(r"s/\\b(\w+)\\b/", PAGE))
    for folder in ("mtagen/templates/cuda", "generated"):
        assert any(name in path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.c*"))


@pytest.mark.parametrize("name", sorted(QUICK))
def test_every_test_of_the_quick_tier_exists(name: str) -> None:
    file, _, function = name.partition("[")[0].partition("::")
    assert f"def {function}(" in page(f"tests/{file}") if function else (ROOT / "tests" / file).is_file()
