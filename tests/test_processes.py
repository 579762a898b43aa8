"""Processes that do jobs: what they import, what they answer, and what becomes of jobs when one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import mtagen
from mtagen.runtime.precompile import precompile
from mtagen.runtime.processes import run_jobs

# A module that the processes find by PYTHONPATH.
WORK = """
    import json, os, sys
    from pathlib import Path

    def do(job):
        print("what a compiler prints")
        if job == "fail":
            raise ValueError("two\\nlines")
        if job == "die":
            os._exit(3)
        import mtagen
        facts = {"path": sys.path, "package": mtagen.__file__, "job": job, "process": os.getpid()}
        Path(__file__).with_name(f"{job}.json").write_text(json.dumps(facts))
"""
SHADOWED = ("json", "importlib", "subprocess", "torch", "triton", "mtagen", "pathlib", "multiprocessing", "typing")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "work_of_a_test.py").write_text(textwrap.dedent(WORK))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    monkeypatch.syspath_prepend(folder)
    import work_of_a_test

    return work_of_a_test.do


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, whose modules say that they were imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name} ')")
    monkeypatch.chdir(folder)
    return folder


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, hostile_folder: Path, work: Any) -> None:
    run_jobs(work, ["one"], 1)
    facts = json.loads((tmp_path / "work/one.json").read_text())
    assert not (hostile_folder / "imported").exists()
    assert not {"", str(hostile_folder)} & set(facts["path"])
    assert facts["package"] == mtagen.__file__


def test_nothing_is_imported_from_the_package_found_first(
    tmp_path: Path, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes have the mtagen of the process that starts them, even if PYTHONPATH names another one."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "mtagen.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{other}{os.pathsep}{os.environ['PYTHONPATH']}")
    run_jobs(work, ["one"], 1)
    assert json.loads((tmp_path / "work/one.json").read_text())["package"] == mtagen.__file__


def test_compiling_imports_nothing_from_the_current_folder(
    tmp_path: Path, hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    made = mtagen.plan(mtagen.Spec((2, 3), 16), "sm_90a", "triton")
    precompile([(made, "forward")], 1)
    assert not (hostile_folder / "imported").exists()
    assert list((tmp_path / "cache").rglob("*.py"))  # it came as far as a GPU is needed


def test_jobs_are_shared_out(tmp_path: Path, work: Any) -> None:
    answers = []
    run_jobs(work, ["a", "fail", "b", "c", "d"], 2, lambda *answer: answers.append(answer))
    assert sorted(answers) == [("a", None), ("b", None), ("c", None), ("d", None), ("fail", "two")]
    facts = [json.loads((tmp_path / f"work/{job}.json").read_text()) for job in "abcd"]
    assert 1 <= len({fact["process"] for fact in facts}) <= 2
    assert os.getpid() not in {fact["process"] for fact in facts}
    run_jobs(work, [], 2)


def test_an_isolated_process_starts_isolated_ones(tmp_path: Path) -> None:
    job = f"import sys; open({str(tmp_path / 'isolated')!r}, 'w').write(str(sys.flags.isolated))"
    program = (
        f"import sys; sys.path.append({str(Path(mtagen.__file__).parents[1])!r})\n"
        f"from mtagen.runtime.processes import run_jobs; run_jobs(exec, [{job!r}], 1)"
    )
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
    assert (tmp_path / "isolated").read_text() == "1"


def test_a_process_that_dies_is_told_of_and_its_next_jobs_are_done(tmp_path: Path, work: Any) -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run_jobs(work, ["die", "a", "b"], 2)
    assert raised.value.returncode == 3
    assert {path.stem for path in (tmp_path / "work").glob("*.json")} == {"a", "b"}
