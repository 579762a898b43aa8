"""Timing of the planner's candidates on this machine's GPU, for ``mtagen tune`` and ``build(...,
tune=True)``.

The alternatives to each decision of each pass are timed one by one, with the other decisions as
planned. Then the two backends, each with its fastest candidates, are compared pass by pass. The
results form a table (:mod:`mtagen.planner.tables`), which is stored in the cache
(:mod:`mtagen.runtime.tuned`).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .check import failures
from .codegen import render
from .config import Config
from .errors import BackendError, PlanError, explain
from .measure.cases import CACHE_LENGTH, LENGTH, SCALES, Sizes
from .measure.inputs import Sampler
from .measure.timing import time_call
from .ops.attention import assemble
from .planner import Backend, Plan, plan
from .planner.choice import GENERATED
from .planner.heads import passes as heads
from .planner.lift.decode import DECODE_ROLES
from .planner.lift.passes import LiftPass
from .planner.passes import PASSES, Fields, PassPlan, describe
from .planner.strip.passes import StripPass
from .planner.tables import TUNED, Shape, Table, shipped
from .runtime.load import Passes, available_backends, load, load_host
from .runtime.loaded import intercepted
from .runtime.precompile import precompile
from .runtime.tuned import describe_machine, remember
from .spec import Spec

_CALLS = 10  # calls that time a kernel of a strip
_ALIKE_COST, _ALIKE_MS = 1e-3, 1e-2  # relative differences of costs and of times that count as ties

_SCALE = SCALES["cuda"]
_LONG = _SCALE.training(LENGTH)
_BATCHED = _SCALE.training(1024)  # short sequences, where a call's CPU time counts
_DECODE_STEPS = _SCALE.decode_steps(CACHE_LENGTH)  # a build does not know how decode will be called
# Sizes for the candidates of each pass, and for the comparison of backends: times are geometric means over them.
CANDIDATE_SIZES = {"forward": (_LONG,), "backward": (_LONG,), "decode": _DECODE_STEPS}
BACKEND_SIZES = {**CANDIDATE_SIZES, **dict.fromkeys(("forward", "backward"), (_LONG, _BATCHED))}


class Candidate(NamedTuple):
    """One candidate for one decision.

    Attributes:
        key: key of the decision.
        plan: a plan with the candidate.
        pass_name: the pass of the decision, which is timed.
    """

    key: str
    plan: Plan
    pass_name: str

    @property
    def pass_plan(self) -> PassPlan:
        """The plan of the pass."""
        return self.plan[self.pass_name]

    @property
    def fields(self) -> Fields:
        """Fields of the decision, which distinguish the candidates."""
        return self.pass_plan.decisions()[self.key]

    @property
    def cost(self) -> float:
        """The candidate's cost by the planner's model."""
        return self.pass_plan.decision_cost(self.key)


class Timed(NamedTuple):
    """A candidate's modelled cost, in cycles of a multiprocessor per score, and its measured time."""

    key: str
    fields: Fields
    cost: float
    ms: float


class Failed(NamedTuple):
    """A candidate that did not run, and the error."""

    key: str
    fields: Fields
    error: str


@dataclass(frozen=True)
class Tuning:
    """The results of tuning.

    Attributes:
        timings: every candidate that ran.
        failed: every candidate that did not run.
        table: the winners.
    """

    timings: tuple[Timed, ...]
    failed: tuple[Failed, ...]
    table: Table


def tune(
    specs: Sequence[Spec],
    target: str,
    *,
    backends: Sequence[str] | None = None,
    limit: int = 8,
    jobs: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuning:
    """Time the candidates for some specs on the current GPU.

    Args:
        specs: the requests.
        target: the GPU's target.
        backends: backends of the candidates; default: the installed backends.
        limit: number of candidates for each decision, the cheapest by the cost model.
        jobs: number of processes that compile Triton kernels.
        progress: called with the number of candidates that are done and the number of all
            candidates.

    Raises:
        BackendError: there is no GPU; a backend is not installed.
        PlanError: no backend has a plan for a spec.
    """
    timed = check_backends(backends)
    plans = [base for spec in specs for base in _plans(spec, target, timed, ())]
    listed = [candidate for base in plans for candidate in candidates_of(base, limit)]
    candidates = {(candidate.key, describe(candidate.fields)): candidate for candidate in listed}.values()
    precompile([(base, name) for base in plans for name in base.triton], jobs)
    precompile([(each.plan, each.pass_name) for each in candidates if each.pass_name in each.plan.triton], jobs)
    timings, failed = [], []
    for done, candidate in enumerate(candidates):
        progress(done, len(candidates))
        key, fields = candidate.key, candidate.fields
        try:
            timings.append(Timed(key, fields, candidate.cost, _time(candidate)))
        except Exception as error:  # a candidate that the compiler or the driver refuses loses; the report says so
            failed.append(Failed(key, fields, f"{type(error).__name__}: {str(error)[:200]}"))
    progress(len(candidates), len(candidates))
    table = Table(TUNED, {key: _winner(group).fields for key, group in _by_key(timings).items()})
    for spec in specs:
        table = table.updated(Table(TUNED, cuda_over_triton=_compare(_plans(spec, target, timed, (table,)))))
    return Tuning(tuple(timings), tuple(failed), table)


def check_backends(backends: Sequence[str] | None = None) -> list[Backend]:
    """The backends whose candidates can be timed here.

    Args:
        backends: those that were asked for; default: those that are installed.

    Raises:
        BackendError: there is no GPU; a backend is not installed.
    """
    if not torch.cuda.is_available():
        raise BackendError(
            explain("device", "cpu", "tuning times kernels on a GPU, and PyTorch finds none", "a machine with a GPU")
        )
    installed = available_backends()
    for backend in backends or ():
        if backend not in installed:
            raise BackendError(explain("backend", backend, "its packages are not installed", installed))
    return [backend for backend in GENERATED if backend in (backends or installed)]


def keep(specs: Sequence[Spec], target: str, table: Table) -> None:
    """Check the plans with ``table`` by the rule of :mod:`mtagen.accuracy`, then store the table
    for later builds.

    Raises:
        BackendError: a plan breaks the accuracy rule; nothing is stored.
    """
    for spec in specs:
        for tuned in _plans(spec, target, available_backends(), (table,)):
            if wrong := failures(assemble(tuned), spec, torch.device("cuda")):
                raise BackendError(
                    f"{tuned.name}, {tuned.backend}, is not accurate with the fastest candidates: {wrong[0]}"
                )
    for spec in specs:
        remember(spec, target, table)


def _plans(spec: Spec, target: str, backends: Sequence[Backend], tables: Sequence[Table]) -> list[Plan]:
    """Plan the spec with each backend that supports it, and with ``auto`` if a backend supports
    only some passes.

    Raises:
        PlanError: no backend supports the spec; the message is the first backend's.
    """
    plans, refusals = [], []
    followed = (*tables, shipped(target))
    for backend in backends:
        try:
            plans.append(plan(spec, target, backend, tables=followed))
        except PlanError as refusal:  # the other backend's candidates remain
            refusals.append(refusal)
    if not plans:
        raise refusals[0]
    if refusals:
        plans.append(plan(spec, target, "auto", backends, followed))
    return plans


def candidates_of(base: Plan, limit: int) -> Iterator[Candidate]:
    """Yield each decision of a plan and its cheapest alternatives, in the first pass that has the
    decision. The lowering of mixed heads is no candidate, because plans by strips lack that decision.
    """
    passes: dict[str, PassPlan] = {}
    for planned_pass in base.passes:
        pass_plan = planned_pass.plan
        passes |= {key: pass_plan for key in pass_plan.decisions() if key not in passes}
    passes.pop(heads.key(base.spec), None)
    for key, planned in passes.items():
        for option in dict.fromkeys([planned, *planned.alternatives(key)[:limit]]):
            yield Candidate(key, base.decided(key, option.decisions()[key]), option.pass_name)


def rank_correlation(timings: Iterable[Timed]) -> dict[str, float]:
    """Return Spearman's coefficient of modelled cost and measured time for each key with at least
    three candidates.

    Costs that differ by less than a thousandth count as equal, and so do times that differ by less than a hundredth:
    the model and a benchmark do not resolve smaller differences.
    """
    return {
        key: _correlation(_ranks([x.cost for x in group], _ALIKE_COST), _ranks([x.ms for x in group], _ALIKE_MS))
        for key, group in _by_key(timings).items()
        if len(group) > 2
    }


def mean_rank_correlation(timings: Iterable[Timed]) -> float:
    """Return the mean of :func:`rank_correlation` over the keys, NaN without keys."""
    coefficients = rank_correlation(timings).values()
    return statistics.fmean(coefficients) if coefficients else math.nan


def report(found: Tuning) -> list[tuple[str, ...]]:
    """Return rows of (key, fastest candidate, ms, the cost model's first, ms, rank correlation)."""
    rows: list[tuple[str, ...]] = []
    coefficients = rank_correlation(found.timings)
    for key, group in _by_key(found.timings).items():
        fastest, first = min(group, key=lambda x: x.ms), min(group, key=lambda x: x.cost)
        coefficient = f"{coefficients[key]:.2f}" if key in coefficients else ""
        names = describe(fastest.fields), describe(first.fields)
        rows.append((key, names[0], f"{fastest.ms:.4f}", names[1], f"{first.ms:.4f}", coefficient))
    return rows


def to_dict(found: Tuning) -> dict[str, Any]:
    """Return a JSON-ready dict: the machine, every candidate's cost and time, the candidates that
    failed.
    """
    return {
        **describe_machine(),
        "mean_rank_correlation": mean_rank_correlation(found.timings),
        "timings": [timed._asdict() for timed in found.timings],
        "failed": [failed._asdict() for failed in found.failed],
    }


def export(table: Table, path: Path) -> None:
    """Write a table in the format of the shipped tables; it replaces decisions that ``path`` may
    already hold.

    Raises:
        OSError: the file cannot be read or written.
    """
    if path.exists():
        table = Table.from_dict(json.loads(path.read_text()), table.source).updated(table)
    path.write_text(json.dumps({**describe_machine(), **table.to_dict()}, indent=1) + "\n")


def _winner(group: Sequence[Timed]) -> Timed:
    """Return the fastest candidate, or the planned (first) candidate if no other is measurably
    faster.
    """
    fastest = min(group, key=lambda timed: timed.ms)
    return fastest if fastest.ms * (1 + _ALIKE_MS) < group[0].ms else group[0]


def _by_key(timings: Iterable[Timed]) -> dict[str, list[Timed]]:
    groups: dict[str, list[Timed]] = {}
    for timed in timings:
        groups.setdefault(timed.key, []).append(timed)
    return groups


def _time(candidate: Candidate) -> float:
    """Return the median ms of a candidate's kernel or pass; for decode, the geometric mean over its
    sizes.
    """
    pass_plan, spec, pass_name = candidate.pass_plan, candidate.plan.spec, candidate.pass_name
    # A fused CUDA pass is one decision. Without shortcuts, nothing stands in for a module's kernels.
    if not isinstance(pass_plan, (StripPass, LiftPass)) or not Config.from_env().shortcuts:
        return _pass_ms(load(candidate.plan, render(candidate.plan)), pass_name, spec, CANDIDATE_SIZES)
    if isinstance(pass_plan, StripPass):
        module = load_host(candidate.plan, render(candidate.plan), pass_name)
        return _kernel_ms(module, pass_plan.role(candidate.key), _call(module, pass_name, spec, _LONG))
    module, role = load_host(candidate.plan, render(candidate.plan), pass_name), pass_plan.role(candidate.key)
    if role in DECODE_ROLES:  # the kernel takes nearly all the time of its pass
        return _ms(_call(module, "decode", spec, _DECODE_STEPS[DECODE_ROLES.index(role)]))
    from .runtime.launches import recorded  # needs triton

    with recorded(module) as launches:
        _call(module, pass_name, spec, _LONG)()
    kernel = _kernel_name(pass_plan, role)
    repeated = [launch for launch in launches if launch.kernel.__name__ == kernel]

    def launch_all() -> None:
        for launch in repeated:
            launch.run()

    return _ms(launch_all)


def _kernel_name(pass_plan: LiftPass, role: str) -> str:
    """Return the name of the kernel of a training pass that has the tile of ``role``."""
    kernel_role = "fwd" if role == "forward" else f"bwd_{role}"
    return next(kernel.name for kernel in pass_plan.kernels if kernel.role == kernel_role)


def _kernel_ms(module: ModuleType, role: str, call: Callable[[], object]) -> float:
    """Return the median ms, over some calls, of all launches of one CUDA kernel of a strip pass."""
    call()  # loads the kernel
    event = partial(torch.cuda.Event, enable_timing=True)
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def launch(kernel: Callable[..., None], *arguments: Any) -> None:
        begin, end = event(), event()
        begin.record()
        kernel(*arguments)
        end.record()
        marks.append((begin, end))

    def launches_ms() -> float:
        marks.clear()
        call()
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in marks))

    with intercepted(module, role, launch):
        return statistics.median(launches_ms() for _ in range(_CALLS))


def _ms(call: Callable[[], object]) -> float:
    return time_call(call, torch.device("cuda")).median


def _compare(plans: Sequence[Plan]) -> dict[str, dict[Shape, float]]:
    """Return the time of CUDA's kernels over Triton's in each pass for which both backends have a
    plan.
    """
    ratios, spec = {}, plans[0].spec
    for name in PASSES:
        serving = {backend: planned for planned in plans for backend in GENERATED if name in planned.served_by(backend)}
        if len(serving) == len(GENERATED):
            loaded = (load(serving[backend], render(serving[backend])) for backend in GENERATED)
            cuda, triton = (_pass_ms(passes, name, spec, BACKEND_SIZES) for passes in loaded)
            ratios[name] = {Shape.of(spec): round(cuda / triton, 3)}
    return ratios


def _pass_ms(passes: Any, name: str, spec: Spec, sizes: Mapping[str, Sequence[Sizes]]) -> float:
    return statistics.geometric_mean(_ms(_call(passes, name, spec, each)) for each in sizes[name])


def _call(passes: Any, name: str, spec: Spec, sizes: Sizes) -> Callable[[], Any]:
    """Return a call of a pass on random inputs;

    ``passes`` is a :class:`mtagen.runtime.load.Passes` or a module.
    """
    sampler = Sampler.for_timing(spec, sizes, torch.device("cuda"))
    inputs, scale = sampler.inputs(decode=name == "decode"), spec.head_dim**-0.5
    arguments = [*inputs.arguments, *([] if spec.weight_names else [None])]
    if name == "decode":
        return partial(passes.decode, *arguments, scale, None, None)
    if name == "forward":
        return partial(passes.forward, *arguments, scale)
    out = sampler.outputs()
    lse = out.new_full(out.shape[:-1], 20.0, dtype=torch.float32)
    # A module that reads unmixed outputs has no decisions to tune.
    columns = passes.unmixed_columns if isinstance(passes, Passes) else 0
    kept = out.new_zeros(*out.shape[:-1], columns) if columns else out
    return partial(passes.backward, out, torch.zeros_like(lse), *arguments, kept, lse, scale, deterministic=False)


def _ranks(values: Sequence[float], tolerance: float) -> list[float]:
    """Rank values from 1; a value that exceeds its predecessor by a factor of at most 1 +
    ``tolerance`` shares its rank.

    Values that share a rank get the mean of their ranks.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] > values[order[end - 1]] * (1 + tolerance):
            for i in order[start:end]:
                ranks[i] = (start + 1 + end) / 2
            start = end
    return ranks


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Pearson's coefficient, or 0 if either sequence is constant, because then there is no
    order to predict.
    """
    return statistics.correlation(one, other) if len({*one}) > 1 and len({*other}) > 1 else 0.0
