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
from mutation.anchors import AnchorError, Language, language_of, replace, tokens
from mutation.mutant import Mutant
from mutation.mutants import MUTANTS

ROOT = Path(__file__).parent.parent


def test_names_are_of_one_mutant_each() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(re.fullmatch(r"[a-z0-9-]+", mutant.name) for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    """The code that it replaces is in its file, once, and the tests that kill it are there."""
    text, language = (ROOT / mutant.file).read_text(encoding="utf-8"), language_of(mutant.file)
    assert code_of(mutant.applied(text), language) != code_of(text, language)
    assert mutant.harm.endswith(".")
    assert mutant.killed_by
    for test in mutant.killed_by:
        file, *name = test.split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name[0].partition('[')[0]}(" in source


# Code is found by its tokens.


def code_of(text: str, language: Language) -> list[str]:
    return [token.text for token in tokens(text, language)]


@pytest.mark.parametrize(
    ("file", "text", "old", "new", "expected"),
    [
        ("a.py", "y = f(a, b)  # why\n", "f(a,b)", "g(a)", "y = g(a)  # why\n"),
        ("a.py", "y = f(\n    a,  # why\n    b,\n)\n", "f(a, b)", "g(a)", "y = g(a)\n"),
        ("a.py", "y = f(a, b)\n", "f(\n    a,\n    b,\n)", "g(a)", "y = g(a)\n"),
        ("a.py", "y = f(a), b\n", "f(a),", "g(a),", "y = g(a), b\n"),
        ("a.py", "y = a // b\n", "a // b", "a / b", "y = a / b\n"),
        ("a.py", "y = '# a'  # a\n", "a", "b", "y = '# b'  # a\n"),
        ("a.py", "y = a\n\n# a\nz = b\n", "a\nz =", "c\nz =", "y = c\nz = b\n"),
        ("a.py", "y = a + \\\n    b\n", "a + b", "a", "y = a\n"),
        ("a.py", "n_context = context\n", "context", "c", "n_context = c\n"),
        ("a.py", "y = i <= n, i < n\n", "i <", "i >", "y = i <= n, i > n\n"),
        ("a.cuh", "  f(a);  // why f(a)\n", "f(a);  // because", "", "    // why f(a)\n"),
        ("a.cuh", "f(a, /* why */ b);\n", "f(a, b)", "g()", "g();\n"),
        ("a.cuh", 'f("//", a);  // a\n', "a", "b", 'f("//", b);  // a\n'),
        ("a.cuh", "/* f(a)\n   f(a) */ f(a);\n", "f(a)", "g", "/* f(a)\n   f(a) */ g;\n"),
        ("cuda/a.cu.j2", "f({{ a // b }}, c);  // a\n", "{{ a // b }}, c", "{{ a }}, c", "f({{ a }}, c);  // a\n"),
        ("cuda/a.cu.j2", "f({{ a // b }}, c);  // a\n", "// b }}, c", "}}, c", "f({{ a }}, c);  // a\n"),
        ("cuda/a.cu.j2", "{# f(a)\n f(a) #}f(a);\n", "f(a)", "g", "{# f(a)\n f(a) #}g;\n"),
        ("cuda/a.py.j2", "y = {{ a }} // b  # a\n", "// b", "/ b", "y = {{ a }} / b  # a\n"),
        (
            "triton/a.j2",
            "{% if a %}\ny = a  # a\n{% endif %}\n",
            "y = a",
            "y = b",
            "{% if a %}\ny = b  # a\n{% endif %}\n",
        ),
    ],
)
def test_comments_and_layout_are_no_part_of_an_anchor(file: str, text: str, old: str, new: str, expected: str) -> None:
    assert replace(text, file, old, new) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if a:\n    f(a)\n    g(a)\n", "if a:\n    with f(a):\n        g(a)\n"),
        ("if b:\n    if a:\n        f(a)\n        g(a)\n", "if b:\n    if a:\n        with f(a):\n            g(a)\n"),
        ("f(a)\ng(a)\n", "with f(a):\n    g(a)\n"),
    ],
)
def test_what_stands_there_instead_is_indented_alike(text: str, expected: str) -> None:
    assert replace(text, "a.py", "    f(a)\n    g(a)\n", "    with f(a):\n        g(a)\n") == expected


PYTHON = """
class A:
    def f(
        self,
    ) -> int:
        return self.g()  # one

# Between.
    def g(self):
        return 1

def f(x):
    return 1
"""
C = """
int f(int x);
{% macro f(x) %}
1
{% endmacro %}
struct A : B {
  int f() const { return 1; }
};
int f(int x) {
  auto g = [&](int y) { return 1; };
  return f(x, 1);
}
"""


@pytest.mark.parametrize(
    ("file", "text", "within", "line"),
    [
        ("a.py", PYTHON, "A.g", 10),
        ("a.py", PYTHON, "g", 10),
        ("a.py", PYTHON, "A", 10),
        ("a.py", PYTHON, "f", 13),
        ("cuda/a.j2", C, "A", 7),
        ("cuda/a.j2", C, "A.f", 7),
        ("cuda/a.j2", C, "g", 10),
    ],
)
def test_within_a_definition(file: str, text: str, within: str, line: int) -> None:
    found = replace(text, file, "1", "2", within)
    assert [
        n for n, (one, other) in enumerate(zip(text.split("\n"), found.split("\n"), strict=True), 1) if one != other
    ] == [line]


@pytest.mark.parametrize(
    ("file", "text", "within", "message"),
    [
        ("a.py", PYTHON, "", r"'1' is 2 times in the code of a.py, in lines 10, 13; take more .* or name its function"),
        ("a.py", PYTHON, "A.f", r"'1' is 0 times in the code of a.py, A.f$"),
        ("a.py", PYTHON, "self", "'self' is no function, class or macro that is defined there"),
        ("cuda/a.j2", C, "f", r"'1' is 4 times in the code of cuda/a.j2, f, in lines 4, 7, 10, 11"),
    ],
)
def test_anchors_that_mean_nothing(file: str, text: str, within: str, message: str) -> None:
    with pytest.raises(AnchorError, match=message):
        replace(text, file, "1", "2", within)


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
        (mutant(old="2*x  # twice"), KILLED, "tests/test_double.py::test_two"),
        (mutant(old="4 * x"), DOES_NOT_APPLY, "'4 * x' is 0 times in the code of double.py"),
        (mutant(old="double", new="twice"), BROKEN, "ImportError"),
        (mutant(old="x"), DOES_NOT_APPLY, "'x' is 2 times in the code of double.py, in lines 1, 2"),
        (mutant(old="# x"), DOES_NOT_APPLY, "'# x' has no code"),
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
