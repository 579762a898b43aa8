"""Tries the mutants: each must make a test fail.

Run from the repository's root::

    python -m tests.mutation                        # every mutant, by the tests named with it
    python -m tests.mutation dw-left-in-fp32        # one of them
    python -m tests.mutation 'forward-*' --list     # which ones a pattern means
    python -m tests.mutation 'forward-*' --all      # by all tests that need no GPU

A mutant is written into a temporary copy of the working tree, and its tests run there. Before that the tests of all
chosen mutants run in the copy as it is, for a test that fails anyway kills nothing. A line a mutant says what came
of it:

    killed          a test failed, as it should;
    survived        all tests passed: they would not see this bug;
    does not apply  the code that it replaces is no longer there, or is there more than once;
    broken          the tests could not run, so that nothing is known;
    too slow        they did not end: a test that waits for ever reports nothing.

Exit status: 0 if every mutant was killed, 1 if one was not, 2 if the arguments are at fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from .anchors import AnchorError
from .mutant import Mutant
from .mutants import MUTANTS

ROOT = Path(__file__).parents[2]
INTERPRETER = "tests/interpreter/"  # tests that need Triton's interpreter, which is chosen when triton is imported
KILLED, SURVIVED, DOES_NOT_APPLY, BROKEN, TOO_SLOW = "killed", "survived", "does not apply", "broken", "too slow"
PASSED, FAILED = 0, 1  # exit status of pytest; the others say that it could not run the tests


class Outcome(NamedTuple):
    """What came of a mutant, or of the tree without one.

    Attributes:
        verdict: one of the words above.
        detail: the test that failed, or what pytest printed if the verdict is no good one.
    """

    verdict: str
    detail: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutation", description="Tries the mutants in tests/mutation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names, or patterns such as 'forward-*'; default all")
    parser.add_argument("--all", action="store_true", help="run all tests that need no GPU, not those named")
    parser.add_argument("--list", action="store_true", help="print what is chosen, and run nothing")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds for the tests of a mutant")
    options = parser.parse_args(arguments)
    strangers = [name for name in options.names if not any(fnmatch(mutant.name, name) for mutant in MUTANTS)]
    if strangers:
        parser.error(f"no mutant is called {', '.join(strangers)}; see --list")
    chosen = [m for m in MUTANTS if not options.names or any(fnmatch(m.name, name) for name in options.names)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.harm}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        return try_all(copy_of_tree(ROOT, Path(folder) / "tree"), chosen, options.timeout, ("tests",) * options.all)


def copy_of_tree(root: Path, to: Path) -> Path:
    """A copy of the files that git tracks or would track, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():  # or it was deleted
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def try_all(tree: Path, mutants: Sequence[Mutant], timeout: float, tests: Sequence[str] = ()) -> int:
    """Try every mutant in ``tree``, print what came of each, and return the exit status.

    Args:
        tree: a copy of the repository, left as it was.
        mutants: those to try.
        timeout: seconds for the tests of one mutant.
        tests: what to run, as pytest takes it; by default what each mutant names.
    """
    started = time.monotonic()
    needed = tests or tuple(dict.fromkeys(test for mutant in mutants for test in mutant.killed_by))
    unchanged = run_tests(tree, needed, timeout * max(1, len(mutants)))
    if unchanged.verdict != SURVIVED:
        print(f"the tests fail without a mutant, {unchanged.verdict}: {unchanged.detail}")
        return 1
    print(f"{'passed':<16} without a mutant {time.monotonic() - started:.0f} s", flush=True)
    escaped = 0
    for mutant in mutants:
        started = time.monotonic()
        outcome = try_one(tree, mutant, timeout, tests)
        print(f"{outcome.verdict:<16} {mutant.name} {time.monotonic() - started:.0f} s", flush=True)
        if outcome.verdict == KILLED:
            print(f"{'':<16} {outcome.detail}")
        else:
            escaped += 1
            print(f"{mutant.file}: {mutant.harm}\n{outcome.detail}".rstrip())
    print(f"{len(mutants) - escaped} of {len(mutants)} killed")
    return 1 if escaped else 0


def try_one(tree: Path, mutant: Mutant, timeout: float, tests: Sequence[str] = ()) -> Outcome:
    """What the tests say of one mutant; afterwards ``tree`` is as it was. See :func:`try_all`."""
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    try:
        mutated = mutant.applied(text)
    except AnchorError as error:
        return Outcome(DOES_NOT_APPLY, str(error))
    file.write_text(mutated, encoding="utf-8")
    try:
        return run_tests(tree, tests or mutant.killed_by, timeout)
    finally:
        file.write_text(text, encoding="utf-8")


def run_tests(tree: Path, tests: Iterable[str], timeout: float) -> Outcome:
    """Run tests in ``tree`` up to the first that fails."""
    interpreted, others = [], []
    for test in tests:
        (interpreted if test.startswith(INTERPRETER) else others).append(test)
    for group, environment in ((others, {}), (interpreted, {"TRITON_INTERPRET": "1"})):
        if not group:
            continue
        outcome = _pytest(tree, group, environment, timeout)
        if outcome.verdict != SURVIVED:
            return outcome
    return Outcome(SURVIVED)


def _pytest(tree: Path, tests: Sequence[str], environment: Mapping[str, str], timeout: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="mutation-") as caches:
        settings = {
            # A mutant may have the size of what it replaces, and follow it within a second: no bytecode, no caches.
            "PYTHONDONTWRITEBYTECODE": "1",
            "MTAGEN_CACHE_DIR": f"{caches}/mtagen",
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "PYTHONPATH": str(tree),  # before an editable install of the working tree
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=tree,
            env={**os.environ, **settings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Outcome(TOO_SLOW, f"stopped after {timeout:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the tests have started
            process.wait()
    if process.returncode == PASSED:
        return Outcome(SURVIVED)
    if process.returncode != FAILED:
        return Outcome(BROKEN, printed[-2000:])
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", printed, flags=re.MULTILINE)
    return Outcome(KILLED, failed[0] if failed else printed[-2000:])


if __name__ == "__main__":
    sys.exit(main())
