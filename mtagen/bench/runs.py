"""Benchmark runs as values: reading from files, queries and merging.

A run is the dict that ``mtagen bench --json`` writes: ``command``, ``environment``, ``commit``, ``rates`` and
``results``, one row for each case and contender that holds either a measurement or the reason why it was skipped.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import InputError, SpecError, explain
from ..measure.cases import LENGTH, PAPER, ROW_KEYS, TRAINING_PASSES, Case
from .names import ONLY_ON_CPU, OURS, name_group, name_kernel, name_size

Run = dict[str, Any]
Row = dict[str, Any]
Rows = Mapping[str, Row]  # the measurements of one case by contender
Cases = dict[Case, Rows]

_RUN_KEYS = ("command", "environment", "commit", "rates", "results")
_TIME_KEYS = ("ms", "low_ms", "high_ms")
_VERSIONS = {"torch": "torch", "triton": "triton", "nvrtc": "NVRTC", "cuda_driver": "driver"}

_Found = TypeVar("_Found")


class Measured(NamedTuple):
    """A case's measurements by contender, all of one run, which has measured ``cases``."""

    rows: Rows
    run: Run
    cases: Cases


Results = dict[Case, Measured]  # results of one device


def load(path: Path) -> Run:
    """Read a run.

    Raises:
        InputError: the file is not a run; the message names what it lacks.
        OSError: it cannot be read.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _no_run(path, f"{error}") from None
    if missing := _missing(run, _RUN_KEYS):
        raise _no_run(path, missing)
    if missing := _missing(run["environment"], ("cpu", "gpus")):
        raise _no_run(path, f"{missing} in 'environment'")
    if not isinstance(run["results"], list):
        raise _no_run(path, "'results' is no list")
    for index, row in enumerate(run["results"]):
        if missing := _missing(row, (*ROW_KEYS, "contender")):
            raise _no_run(path, f"{missing} in results[{index}]")
        rate = "gbps" if row["pass"] == "decode" else "tflops"
        if "skipped" not in row and (missing := _missing(row, (*_TIME_KEYS, rate))):
            raise _no_run(path, f"neither 'skipped' nor a measurement ({missing}) in results[{index}]")
        if not _is_case(row) or not all(_is_time(row[key]) for key in _TIME_KEYS if key in row):
            raise _no_run(path, f"a wrong value in results[{index}]")
    return dict(run)


def _missing(found: object, keys: Iterable[str]) -> str | None:
    if not isinstance(found, dict):
        return "an object is expected"
    absent = [key for key in keys if key not in found]
    return f"no {', '.join(map(repr, absent))}" if absent else None


def _is_case(row: Row) -> bool:
    try:
        case = Case.from_dict(row)
    except (SpecError, TypeError):
        return False
    return (
        all(type(size) is int and size > 0 for size in case.sizes)
        and isinstance(row["contender"], str)
        and case.pass_name in (*TRAINING_PASSES, "decode")
    )


def _is_time(ms: object) -> bool:
    return isinstance(ms, (int, float)) and 0 < ms < math.inf


def _no_run(path: Path, fault: str) -> InputError:
    return InputError(explain("run", str(path), f"is no benchmark run: {fault}", "a file of mtagen bench --json"))


def load_folder(folder: Path) -> dict[Path, Run]:
    """Read the runs in a folder, ignoring JSON files without ``results`` or ``rates``.

    Raises:
        InputError: as :func:`load`.
    """
    paths = sorted(folder.glob("*.json"))
    return {path: load(path) for path in paths if {"results", "rates"} <= json.loads(path.read_text()).keys()}


def by_device(runs: Mapping[Path, Run]) -> dict[str, dict[Path, Run]]:
    """Group runs by the name of the device.

    GPUs come first, and the device with the most results of its kind first.
    Each run gets its file's name under ``name``.
    """
    devices: dict[str, dict[Path, Run]] = {}
    for path, run in sorted(runs.items(), key=lambda item: on_cpu(item[1])):
        devices.setdefault(device(run), {})[path] = {**run, "name": path.stem}

    def rank(name: str) -> tuple[bool, int]:
        of_device = devices[name].values()
        return any(map(on_cpu, of_device)), -sum(len(run["results"]) for run in of_device)

    return {name: devices[name] for name in sorted(devices, key=rank)}


def on_cpu(run: Run) -> bool:
    """Return whether a run is of the CPU: there is no GPU, or contenders ran that only the CPU has."""
    return not run["environment"]["gpus"] or any(row["contender"] in ONLY_ON_CPU for row in run["results"])


def device(run: Run) -> str:
    """Return the name of the GPU or CPU."""
    environment = run["environment"]
    return str(environment["cpu"] if on_cpu(run) else environment["gpus"][0]["name"])


def suite_of(run: Run) -> str:
    """Return the suite of a run, which may hold only a part of it."""
    found = re.search(r"--suite[= ](\w+)", run["command"])
    return found.group(1) if found else ""


def machine(run: Run) -> str:
    """Return a description of a run's machine: device, versions, driver."""
    environment = run["environment"]
    versions = [f"{name} {environment[key]}" for key, name in _VERSIONS.items() if environment.get(key)]
    return ", ".join([device(run), *versions])


def source(run: Run) -> str:
    """Return a description of the source of figures: machine, commit, and whether the run is
    incomplete.
    """
    notes = ["interrupted"] if run.get("interrupted") else []
    return ", ".join([machine(run), f"commit {run['commit'] or 'unknown'}", *notes])


def measurements(run: Run) -> Cases:
    """Return all cases of a run in its order, with their measurements; empty where every contender
    was skipped.
    """
    cases: dict[Case, dict[str, Row]] = {}
    for row in run["results"]:
        rows = cases.setdefault(Case.from_dict(row), {})
        if "ms" in row:
            rows[row["contender"]] = row
    return {**cases}


def skipped(rows: Iterable[Row]) -> list[str]:
    """Return a line for each contender and reason among rows, with the cases if they are not all of
    its cases.
    """
    rows = list(rows)
    totals = Counter(row["contender"] for row in rows)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "skipped" in row:
            reasons.setdefault((row["contender"], row["skipped"]), []).append(name_size(Case.from_dict(row)))
    contenders: dict[str, list[str]] = {}
    for (name, reason), sizes in reasons.items():
        of = "" if len(sizes) == totals[name] else f" ({len(sizes)} of {totals[name]} cases: {_abridged(sizes)})"
        contenders.setdefault(reason + of, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in contenders.items()]


def _abridged(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names if len(names) <= 3 else (names[0], f"{len(names) - 2} more", names[-1]))


def merge(runs: Iterable[Run], key: str = "ms", names: Collection[str] = (), suite: str = "") -> Results:
    """Merge runs on one device.

    For a case in several runs, take the run in which the most contenders have ``key``.
    Only ``names`` count, if there are any. Runs of ``suite`` go before all others. Ties go to the first.
    """

    def rank(found: Measured) -> tuple[bool, int]:
        count = sum(name in names for name in found.rows) if names else len(found.rows)
        return suite_of(found.run) == suite, count

    results: Results = {}
    for run in runs:
        cases = measurements(run)
        for case, measured in cases.items():
            found = Measured({name: row for name, row in measured.items() if row.get(key) is not None}, run, cases)
            if case not in results or rank(found) > rank(results[case]):
                results[case] = found
    return dict(sorted(results.items(), key=lambda item: _place(item[0])))


def union(runs: Iterable[Run], names: Collection[str] = ()) -> Cases:
    """Unite runs on one device.

    For a contender of a case in several runs, take the run with the most contenders at the case.
    Unlike in :func:`merge`, the contenders of a case may come from several runs. Only ``names`` count, if given.
    """
    results: Cases = {}
    found = [item for run in runs for item in measurements(run).items()]

    def count(item: tuple[Case, Rows]) -> int:
        return sum(name in names for name in item[1]) if names else len(item[1])

    for case, rows in sorted(found, key=count, reverse=True):
        results[case] = {**rows, **results.get(case, {})}
    return dict(sorted(results.items(), key=lambda item: _place(item[0])))


def _place(case: Case) -> tuple[object, ...]:
    """Return the sort key of a line of a table."""
    spec, sizes, step = case.spec, case.sizes, (*TRAINING_PASSES, "decode").index(case.pass_name)
    kernels = spec.kernel or (0, 0), spec.post_kernel or (0, 0)
    stages = *kernels, spec.mixed_heads or 0, spec.post_mixed_heads or 0
    data = spec.window, spec.packed, spec.dropout, spec.expressions, spec.parameters, spec.constants, spec.sink
    return spec.head_dim, not case.causal, sizes.nk, sizes.batch, *stages, -sizes.kv_heads, sizes.nq, *data, step


def predicted(case: Case, name: str, cases: Mapping[Case, Rows]) -> Row | None:
    """Predict a contender's time at ``case`` from its time per visible score at the case's base.

    This is its measurement of the base among ``cases``, scaled by the visible scores; None without
    a measurement.
    """
    row = cases.get(case.base, {}).get(name) if case != case.base else None
    return row and {**row, "ms": row["ms"] * case.visible_scores / case.base.visible_scores}


def fastest(rows: Rows, names: Iterable[str]) -> Row | None:
    """Return the measurement of the fastest of some contenders; None without a measurement."""
    return min((rows[name] for name in names if name in rows), key=lambda row: row["ms"], default=None)


def ours_and(rows: Rows, names: Iterable[str]) -> Rows:
    """Return the measurements of mtagen's fastest contender, as ``mtagen``, and of some other
    contenders.
    """
    ours = fastest(rows, OURS)
    return ({"mtagen": ours} if ours else {}) | {name: rows[name] for name in names if name in rows}


def is_the_papers(case: Case) -> bool:
    """Return whether a case is one causal convolution of the paper's extents, without window,
    documents and dropout.
    """
    return case.spec.kernel == PAPER and case.spec.convolves_only and case.causal and case.base == case


def is_a_layer(case: Case) -> bool:
    """Return whether a case is causal with other stages than a convolution before the softmax, and
    nothing else.
    """
    return not case.spec.convolves_only and case.causal and case.base == case


def smallest_batches(cases: Mapping[Case, _Found]) -> dict[Case, _Found]:
    """Return the cases without those that also exist with fewer sequences."""
    kept: dict[Case, Case] = {}
    for case in sorted(cases, key=lambda case: case.sizes.batch):
        kept.setdefault(replace(case, sizes=case.sizes._replace(batch=1)), case)
    smallest = set(kept.values())
    return {case: found for case, found in cases.items() if case in smallest}


def typical_length(cases: Iterable[Case]) -> int:
    """Return N for tables and panels with a single length: ``LENGTH``, or the largest measured."""
    lengths = {case.sizes.nk for case in cases}
    return LENGTH if LENGTH in lengths else max(lengths)


def typical_kernel(cases: Iterable[Case]) -> str:
    """Return the kernel for tables and panels with a single kernel: the paper's, or the first
    measured.
    """
    names = {case.spec: name_kernel(case) for case in cases}
    papers = [name for spec, name in names.items() if spec.kernel == PAPER and spec.convolves_only]
    return next(iter(papers or names.values()))


def groups(cases: Cases) -> dict[str, Cases]:
    """Group cases by :func:`name_group`: each group is one table or panel."""
    found: dict[str, Cases] = {}
    for case, rows in cases.items():
        found.setdefault(name_group(case), {})[case] = rows
    return found
