"""A benchmark run: all contenders on all cases, as a JSON-ready dict."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from ..accuracy import Comparison
from ..environment import collect
from ..measure.cases import Case
from ..measure.inputs import Inputs
from ..measure.timing import BUDGET_MS, graph_ms, issuing_us, peak_mib, time_call
from ..runtime.processes import run_jobs
from .contenders import Built, Contender, entrants, make_inputs
from .rates import Rates, measure_rates, roofline_ms, useful_flop
from .suites import PATIENCE

_WRONG, _FAILED = "wrong: ", "failed: "
_ISSUING_ROUNDS = 10

Call = Callable[[], Any]
_Measured = tuple[dict[str, Any], Call | None]  # figures of a case, and its call if that is to be issued again


def run(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    command: str,
    jobs: int = 1,
    launches: bool = False,
    budget_ms: float = BUDGET_MS,
    patience: float = PATIENCE,
) -> dict[str, Any]:
    """Check every contender on every kind of case, then time it. Progress goes to stderr.

    Args:
        cases: the passes of each problem one after the other.
        contenders: see :func:`mtagen.bench.contenders.entrants`.
        device: where they run.
        command: what reproduces this.
        jobs: processes that build beforehand what a GPU needs.
        launches: also measure what the CPU does in a call, and the call in a CUDA graph.
        budget_ms: for the repetitions of one measurement.
        patience: seconds; whose call takes longer is not timed with more scores.

    Returns:
        ``command``, ``environment``, ``commit``, ``rates`` (None if interrupted before), ``interrupted`` (by Ctrl-C:
        ``results`` are those before it) and ``results``: a row for each case and contender that enters, with ``ms`` and
        more, or with ``skipped``, which says why not.
    """
    facts = {name: fact for name, fact in collect().items() if name not in ("cache_dir", "platform")}
    results: list[dict[str, Any]] = []
    made: dict[str, Any] = {"command": command, "environment": facts, "commit": _commit(), "rates": None}
    made |= {"interrupted": False, "results": results}
    try:
        with _progress() as progress:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                _fill_caches(cases, contenders, device, jobs, progress)
            rates = measure_rates(device)
            made["rates"] = rates._asdict()
            session = _Session(device, rates, launches, budget_ms, patience)
            problems = [list(group) for _, group in groupby(cases, lambda case: case.problem)]
            task = progress.add_task("measuring", total=len(problems) * len(contenders))
            for group in problems:
                inputs = make_inputs(group[0], device)
                for contender in contenders:
                    progress.update(task, description=f"{contender.name} {_title(group[0])}", advance=1)
                    if contender.enters(group[0]):
                        results += session.rows(contender, group, inputs)
            progress.update(task, description="issuing calls")
            session.time_issuing()
    except KeyboardInterrupt:
        made["interrupted"] = True
    return made


def faults(made: dict[str, Any]) -> list[str]:
    """Return the contenders of a run that were wrong or failed, once for each reason."""
    rows = ((row["contender"], row.get("skipped", "")) for row in made["results"])
    return list(dict.fromkeys(f"{name}: {why}" for name, why in rows if why.startswith((_WRONG, _FAILED))))


class _Session:
    """State of a run across its cases: rates, verdicts, and times of contenders that do not depend
    on the kernel.
    """

    def __init__(self, device: torch.device, rates: Rates, launches: bool, budget_ms: float, patience: float) -> None:
        self._device = device
        self._rates = rates
        self._launches = launches
        self._budget_ms = budget_ms
        self._patience = patience
        self._slow: dict[Hashable, tuple[int, str]] = {}  # scores that took long, and how long
        self._verdicts: dict[Hashable, dict[str, Any]] = {}
        self._shared: dict[Hashable, list[_Measured]] = {}
        self._issued: list[tuple[dict[str, Any], Call, list[float]]] = []  # rows, calls, the CPU's times

    def rows(self, contender: Contender, group: Sequence[Case], inputs: Inputs) -> list[dict[str, Any]]:
        """Return the results of one contender for the passes of one problem."""
        key = (contender.name, *map(_without_convolution, group))
        found = self._shared.get(key) or self._figures(contender, group, inputs)
        if not contender.convolves:
            self._shared[key] = found
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the contenders that ask what is free
        rows = []
        for case, (figures, call) in zip(group, found, strict=True):
            rows.append(case.to_dict() | {"contender": contender.name} | figures)
            if call:
                self._issued.append((rows[-1], call, []))
        return rows

    def time_issuing(self) -> None:
        """Add the CPU's time to issue each call, in rounds, so that a disturbance of seconds
        affects each call little.
        """
        for _ in range(_ISSUING_ROUNDS):
            for row, call, times in self._issued:
                row |= _attempt(partial(self._issue, call, times))

    def _issue(self, call: Call, times: list[float]) -> dict[str, Any]:
        times += issuing_us(call, self._device)
        return {"cpu_us": statistics.median(times)}

    def _figures(self, contender: Contender, group: Sequence[Case], inputs: Inputs) -> list[_Measured]:
        """Return the measured part of each row, and the calls that can be repeated."""
        verdict = _attempt(lambda: self._admit(contender, group[0]))
        if "skipped" in verdict:
            return [(verdict, None)] * len(group)
        function = contender.prepare(group[0])
        tensors = contender.arguments(group[0], inputs)
        found: list[_Measured] = []
        for case in group:
            figures = _attempt(partial(self._time, contender, case, function, tensors, inputs, verdict))
            again = "graph_ms" in figures and contender.lasts
            found.append((figures, _call(case.pass_name, function, tensors, inputs) if again else None))
        return found

    def _admit(self, contender: Contender, case: Case) -> dict[str, Any]:
        """Return the worst result of the check before timing; it does not depend on batch and
        lengths.
        """
        if reason := contender.refusal(case):
            return {"skipped": reason}
        alike = case if contender.convolves else _without_convolution(case)
        heads, rows = (case.sizes.heads, case.sizes.kv_heads), case.sizes.nq if case.decodes else None
        key = (contender.name, alike.spec, heads, rows)
        if key not in self._verdicts:
            self._verdicts[key] = _attempt(lambda: _check(contender, case))
        return self._verdicts[key]

    def _time(
        self,
        contender: Contender,
        case: Case,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        inputs: Inputs,
        verdict: dict[str, Any],
    ) -> dict[str, Any]:
        device, on_gpu = self._device, self._device.type == "cuda"
        series = (contender.name, replace(case, sizes=case.sizes._replace(batch=1, nq=1, nk=1)))
        most, why = self._slow.get(series, (case.visible_scores, ""))
        if case.visible_scores > most:
            return {"skipped": why}
        call = _call(case.pass_name, function, tensors, inputs)
        peak = peak_mib(call, device) if on_gpu and "forward" in case.pass_name else None  # which warms it up
        timing = time_call(call, device, self._budget_ms, warmed=peak is not None)
        if timing.median > 1e3 * self._patience:
            took = f"took {timing.median / 1e3:.2g} s at N = {case.sizes.nk}"
            self._slow[series] = case.visible_scores, f"{took}: more only with more --patience than {self._patience} s"
        seconds = timing.median / 1e3
        row = {"ms": timing.median, "low_ms": timing.low, "high_ms": timing.high, "repeats": timing.repeats, **verdict}
        if case.decodes:
            row["gbps"] = case.cache_bytes / seconds / 1e9
        else:
            row["tflops"] = useful_flop(case) / seconds / 1e12
        if "forward" in case.pass_name:
            row["peak_MiB"] = peak
        if isinstance(contender, Built):
            row["roofline_ms"] = roofline_ms(case, contender.plan(case), self._rates)
            row["fraction"] = row["roofline_ms"] / timing.median
        if self._launches:
            row["graph_ms"] = graph_ms(call, device)
            if not contender.lasts:
                times = [us for _ in range(_ISSUING_ROUNDS) for us in issuing_us(call, device)]
                row["cpu_us"] = statistics.median(times)
        return row


def _without_convolution(case: Case) -> Case:
    """Return a case without convolution and mixing: it is the same for all stages to contenders
    that ignore them.
    """
    plain = replace(case.spec, kernel=(1, 1), mixed_heads=None, post_kernel=None, post_mixed_heads=None)
    return replace(case, spec=plain)


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a function's result; an error costs the row, not the run."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        return {"skipped": f"out of memory: {_first_line(error)}"}
    except Exception as error:
        return {"skipped": f"{_FAILED}{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _check(contender: Contender, case: Case) -> dict[str, Any]:
    """Check a contender; return the result that is closest to its limit, or exceeds it most."""
    judged = contender.check(case)
    name, worst = max(judged.items(), key=lambda item: _closeness(item[1]))
    if not worst.ok:
        return {"skipped": f"{_WRONG}{name} errs by {worst.error:.2g}, allowed {worst.allowed:.2g}"}
    return {"error": worst.error, "allowed": worst.allowed, "checked": name}


def _closeness(comparison: Comparison) -> tuple[bool, float]:
    share = comparison.error / comparison.allowed if comparison.allowed else 0.0
    return not comparison.ok, share


def _call(pass_name: str, function: Callable[..., Any], tensors: Sequence[Tensor], inputs: Inputs) -> Call:
    """Return a call of one pass, which returns its results."""
    if pass_name in ("forward", "decode"):
        return partial(function, *tensors)
    tensors = [x.detach().requires_grad_(inputs.has_gradient(x)) for x in tensors]
    leaves = [x for x in tensors if x.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        out = function(*tensors)
        return (out,) if isinstance(out, Tensor) else tuple(out)

    outs = forward()
    grad_outs = [torch.randn_like(out) for out in outs]
    if pass_name == "backward":
        return partial(torch.autograd.grad, outs, leaves, grad_outs, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        outs = forward()
        return (*outs, *torch.autograd.grad(outs, leaves, grad_outs))

    return both


def _fill_caches(
    cases: Sequence[Case], contenders: Sequence[Contender], device: torch.device, jobs: int, progress: Progress
) -> None:
    """Fill the disk caches in parallel processes."""
    work: dict[Hashable, tuple[str, Case]] = {}
    for contender in contenders:
        for case in cases:
            if (key := contender.warm_key(case)) is not None and contender.enters(case):
                work.setdefault((contender.name, key), (contender.name, case))
    task = progress.add_task("building", total=len(work))

    def done(job: tuple[str, str, dict[str, Any]], error: str | None) -> None:
        if error:  # it is tried again, and skipped, where it is to be measured
            _, name, row = job
            progress.console.print(f"{name} {_title(Case.from_dict(row))} is not built: {error}", markup=False)
        progress.advance(task)

    with suppress(subprocess.CalledProcessError):
        run_jobs(_warm, [(str(device), name, case.to_dict()) for name, case in work.values()], jobs, done)


def _warm(job: tuple[str, str, dict[str, Any]]) -> None:
    device, name, case = torch.device(job[0]), job[1], Case.from_dict(job[2])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()  # what the one before needed
    (contender,) = entrants("full", device, [name])
    contender.warm(case)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


def _title(case: Case) -> str:
    return f"{case.spec.cq} x {case.spec.ck}, d = {case.spec.head_dim}, N = {case.sizes.nk}"


def _commit() -> str | None:
    """Return the commit of the checkout that contains this package, if there is one."""
    package = Path(__file__).parents[1]
    if _git("rev-parse", "--show-toplevel") != str(package.parent):
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
