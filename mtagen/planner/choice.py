"""Choose the lowering of each pass, and one of the lowering's candidates.

Users name backends. If the only stage is a convolution before the softmax, ``triton`` uses the
lowering "lift" (:mod:`.lift`) and ``cuda`` the lowering "tile" (:mod:`.tile`). With other stages,
with a function of scores before the convolution, or with a convolution and a mask that is no
window, both use the lowering "strip" (:mod:`.strip`), except that "lift" has functions before the
convolution that add terms by distance (:mod:`.lift.bias`); ``cuda`` has kernels for most roles there,
and Triton's kernels do the rest. If heads only mix, ``cuda`` mixes them on the chip in the forward pass,
by the lowering "heads" (:mod:`.heads`), where that is expected to be faster. If "tile" cannot fuse a
backward pass, because its head dims are too wide or differ, ``cuda`` uses strips where it has the
kernels. ``torch`` runs tiled PyTorch ops.

Where both ``cuda`` and ``triton`` can do a pass, ``auto`` takes the one that is expected to be
faster, and CUDA where they are close. The expected ratio of times is measured if a table
(:mod:`.tables`) has the shape. Otherwise it is scaled from the nearest measured shape by planned
work, or it is that of the cost models where the two differ in more than work. Forward and backward
passes of one plan round scores alike (:func:`.passes.rounds_alike`).

Each decision of a pass is taken from a table if one has it. Otherwise the cheapest candidate by the
cost model is taken.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

from ..errors import PlanError, explain
from ..spec import Spec
from . import torch_ops
from .heads import passes as heads
from .lift import passes as lift
from .lift.bias import why_not as why_no_bias
from .passes import Fields, PassPlan, passes_of, rounds_alike
from .strip import passes as strip
from .tables import Shape, Table
from .targets import Target
from .tile import candidates as tile

Backend: TypeAlias = Literal["auto", "cuda", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
GENERATED: tuple[Backend, ...] = ("cuda", "triton")
COST_MODEL, ONLY_ONE = "cost model", "the only one"
# ``auto`` takes fused CUDA kernels up to this ratio of CUDA's time to Triton's. Calls of CUDA kernels take less than
# half of the CPU time of Triton's (benchmarks/notes/planning.md, "Backends"), which matters for short sequences.
CUDA_UP_TO = 1.15
INSTALL = {"cuda": "pip install 'mtagen[cuda]'", "triton": "pip install triton"}


class Lowering(Protocol):
    """The functions that a lowering's module offers to the planner."""

    def candidates(self, pass_name: str, spec: Spec, target: Target) -> Sequence[PassPlan]:
        """Return the plans of a pass, the cheapest first; raise PlanError with the reason if there
        is none.
        """

    def from_fields(self, pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> PassPlan:
        """Return the plan with these decisions."""

    def flop_per_score(self, pass_name: str, spec: Spec) -> int:
        """Return the flop per (row, key) pair of a training pass."""


def lowerings(backend: str, spec: Spec) -> Mapping[str, Lowering]:
    """Return a backend's lowerings for a spec by name.

    The first that has candidates makes a pass, unless the lowering "heads" is faster.
    """
    if backend not in GENERATED:
        return {"tiled ops": torch_ops}
    strips: Mapping[str, Lowering] = {"strip": strip.LOWERINGS[backend]}
    if why_unfused(spec, backend):
        return {**strips, "heads": heads} if backend == "cuda" else strips
    if backend == "cuda":
        return {"tile": tile, **strips}
    return {"lift": lift, **strips} if spec.scores else {"lift": lift}


def why_unfused(spec: Spec, backend: str) -> str:
    """Return the reason why no kernel of a backend can fuse a pass of a spec; empty if one may."""
    if not spec.convolves_only:
        return "fused kernels have no stage but a convolution before the softmax"
    if spec.scores and backend == "cuda":
        return "scores changes scores before the convolution, and fused kernels convolve scores as they are"
    if reason := why_no_bias(spec):
        return reason
    if backend == "triton" and spec.cq * spec.ck > 1 and spec.visible:
        return "visible is no window, and Triton's fused kernels convolve in windows only"
    return ""


def candidates(backend: str, pass_name: str, spec: Spec, target: Target) -> Sequence[PassPlan]:
    """Return the plans of a pass by a backend, the cheapest first.

    Raises:
        PlanError: no lowering has a plan; the message is that of the first lowering.
    """
    refusals = []
    for lowering in lowerings(backend, spec).values():
        try:
            return lowering.candidates(pass_name, spec, target)
        except PlanError as refusal:
            refusals.append(refusal)
    raise refusals[0]


class Choice(NamedTuple):
    """The backend that computes a pass, and the reason."""

    pass_name: str
    backend: str
    reason: str


@dataclass(frozen=True)
class PlannedPass:
    """One pass of a plan.

    Attributes:
        plan: the plan of the pass.
        reason: the reason for the backend.
        sources: (key, source) of each decision; the source is a table or the cost model.
    """

    plan: PassPlan
    reason: str
    sources: tuple[tuple[str, str], ...]

    @property
    def backend(self) -> str:
        """The backend that computes the pass."""
        return self.plan.backend

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; :meth:`from_dict` inverts it."""
        sources = dict(self.sources)
        decisions = {
            key: {"fields": dict(fields), "source": sources[key]} for key, fields in self.plan.decisions().items()
        }
        made_by = {"backend": self.backend, "lowering": self.plan.lowering}
        return {**made_by, "reason": self.reason, "decisions": decisions}

    @classmethod
    def from_dict(cls, pass_name: str, spec: Spec, target: str, fields: Mapping[str, Any]) -> PlannedPass:
        """Return the planned pass that :meth:`to_dict` made ``fields`` from."""
        decisions = {key: decision["fields"] for key, decision in fields["decisions"].items()}
        sources = tuple((key, decision["source"]) for key, decision in fields["decisions"].items())
        lowering = lowerings(fields["backend"], spec)[fields["lowering"]]
        return cls(lowering.from_fields(pass_name, spec, target, decisions), fields["reason"], sources)


def plan_pass(choice: Choice, spec: Spec, target: Target, tables: Sequence[Table]) -> PlannedPass:
    """Plan a pass by the chosen backend: decisions come from the first table that has them, else
    from cost.

    Raises:
        PlanError: the backend has no plan; the message names the limit.
    """
    plan, sources = _heads(choice, spec, target, tables), {}
    plan = plan or candidates(choice.backend, choice.pass_name, spec, target)[0]
    for key in plan.decisions():
        has_others = key == heads.key(spec) or len(plan.alternatives(key)) > 1
        sources[key] = COST_MODEL if has_others else ONLY_ONE
        for table in tables:
            if fields := table.decisions.get(key):
                try:
                    plan = plan.decided(key, fields)
                except PlanError:  # an old table may name candidates that this version no longer has
                    continue
                sources[key] = table.source
                break
    return PlannedPass(plan, choice.reason, tuple(sources.items()))


def _heads(choice: Choice, spec: Spec, target: Target, tables: Sequence[Table]) -> PassPlan | None:
    """Return the plan of the lowering "heads" if it has one, and a table or else the cost model says that it is faster
    than strips.
    """
    if (choice.pass_name, choice.backend) != ("forward", "cuda"):
        return None
    try:
        plan = heads.candidates(choice.pass_name, spec, target)[0]
    except PlanError:
        return None
    key = heads.key(spec)
    named = next((table.decisions[key] for table in tables if key in table.decisions), None)
    if named is None:
        return plan if plan.cost < candidates(choice.backend, choice.pass_name, spec, target)[0].cost else None
    return plan if named == heads.FIELDS else None


def choose_backends(
    spec: Spec, target: Target, available: Collection[str], tables: Sequence[Table]
) -> tuple[Choice, ...]:
    """Choose the backend of each pass for ``auto`` on a GPU.

    Raises:
        PlanError: no available backend can do a pass; the message is Triton's if Triton is
            available.
    """
    offers = {name: _offers(name, spec, target, available, tables) for name in passes_of(spec)}
    chosen = {name: ranked[0] for name, ranked in offers.items()}
    trains = {"forward", "backward"} <= chosen.keys()
    if trains and not rounds_alike(chosen["forward"].plan, chosen["backward"].plan):
        chosen |= _pair(offers["forward"], offers["backward"])
    return tuple(Choice(name, offer.plan.backend, offer.reason) for name, offer in chosen.items())


class _Offer(NamedTuple):
    """One backend's plan of a pass.

    Attributes:
        plan: the plan.
        time: expected time over that of Triton's plan.
        reason: the reason to take this plan: it is faster, or the only one.
    """

    plan: PassPlan
    time: float
    reason: str


def _offers(
    pass_name: str, spec: Spec, target: Target, available: Collection[str], tables: Sequence[Table]
) -> list[_Offer]:
    """Return the plans of a pass by the backends that can make it; the one that ``auto`` prefers
    comes first.

    Raises:
        PlanError: no backend can make the pass.
    """
    plans: dict[str, PassPlan] = {}
    refusals: dict[str, PlanError] = {}
    for backend in GENERATED:
        try:
            plans[backend] = _cheapest(backend, pass_name, spec, target, available)
        except PlanError as refusal:
            refusals[backend] = refusal
    if len(refusals) == len(GENERATED):
        raise refusals["triton" if "triton" in available else "cuda"]
    if "cuda" in refusals:
        return [_Offer(plans["triton"], 1.0, f"not cuda: {refusals['cuda']}")]
    if "triton" in refusals:
        return [_Offer(plans["cuda"], 1.0, f"not triton: {refusals['triton']}")]
    ratio, source = cuda_over_triton(plans["cuda"], plans["triton"], tables)
    cuda = _Offer(plans["cuda"], ratio, f"{ratio:.2f} of triton's time, {source}")
    triton = _Offer(plans["triton"], 1.0, f"cuda takes {ratio:.2f} of its time, {source}")
    prefers_cuda = ratio <= (1.0 if plans["cuda"].lowering == "strip" else CUDA_UP_TO)
    return [cuda, triton] if prefers_cuda else [triton, cuda]


def _pair(forwards: Sequence[_Offer], backwards: Sequence[_Offer]) -> dict[str, _Offer]:
    """Return the fastest forward and backward pass that round scores alike.

    Raises:
        PlanError: no two passes round scores alike.
    """

    def time(pair: tuple[_Offer, _Offer]) -> float:
        """Return the expected time of both passes, in flop of Triton's lowering."""
        return sum(
            offer.time * next(iter(lowerings("triton", offer.plan.spec).values())).flop_per_score(name, offer.plan.spec)
            for name, offer in zip(("forward", "backward"), pair, strict=True)
        )

    pairs = [pair for pair in product(forwards, backwards) if rounds_alike(*(offer.plan for offer in pair))]
    if not pairs:
        found = tuple(f"{offer.plan.backend} by {offer.plan.lowering}" for offer in (*forwards, *backwards))
        raise PlanError(
            explain("backend", found, "no forward and backward pass among them round scores alike", "backend='torch'")
        )
    fastest = min(pairs, key=time)
    chosen = {}
    for name, other, offer, offers in zip(
        ("forward", "backward"), ("backward", "forward"), fastest, (forwards, backwards), strict=True
    ):
        rule = f"; {offers[0].plan.backend} would round scores otherwise than the {other} pass"
        chosen[name] = offer if offer is offers[0] else offer._replace(reason=offer.reason + rule)
    return chosen


def _cheapest(backend: str, pass_name: str, spec: Spec, target: Target, available: Collection[str]) -> PassPlan:
    """Return the cheapest plan of a pass by an available backend.

    Raises:
        PlanError: the backend cannot do the pass, or is not installed.
    """
    if backend not in available:
        raise PlanError(explain("backend", backend, "is not installed", INSTALL[backend]))
    plan = candidates(backend, pass_name, spec, target)[0]
    if plan.lowering == "strip" and "triton" not in available:
        rule = "needs Triton's kernels too, and Triton is not installed"
        raise PlanError(explain("backend", backend, rule, INSTALL["triton"]))
    return plan


def cuda_over_triton(cuda: PassPlan, triton: PassPlan, tables: Sequence[Table]) -> tuple[float, str]:
    """Return the expected time of CUDA's plan of a pass over Triton's, and the source of the
    figure.

    The ratio of a measured shape is the measured one. The ratio of another shape is that of the
    nearest measured shape, scaled by the change in the ratio of planned work; without measurements
    it is the ratio of planned work. If CUDA's plan is one of strips, measurements of fused kernels
    say nothing about it, so the ratio is that of the cost models. With other stages than a
    convolution before the softmax, or a function of scores before it, shapes that were not measured
    get the largest measured ratio.
    """
    pass_name, spec = cuda.pass_name, cuda.spec
    here = Shape.of(spec)
    measured: dict[Shape, float] = {}
    for table in tables:
        shapes = table.cuda_over_triton.get(pass_name, {})
        if here in shapes:
            return shapes[here], table.source
        measured = {**{shape: ratio for shape, ratio in shapes.items() if not shape.stages}, **measured}
    if not spec.is_fusible and triton.lowering == "strip":
        return strip.cuda_over_triton(pass_name, spec)
    if "strip" in (cuda.lowering, triton.lowering):
        return cuda.cost / triton.cost, "by the cost models"
    work = _work_ratio(pass_name, (spec.cq, spec.ck), spec.head_dim, spec.value_head_dim)
    if not measured:
        return work, "by planned work"
    nearest = min(measured, key=lambda shape: (shape.mask != here.mask, _distance(shape[:3], here[:3]), shape))
    cq, ck, d, *_ = nearest
    ratio = measured[nearest] * work / _work_ratio(pass_name, (cq, ck), d, nearest.value_head_dim or d)
    return ratio, f"scaled from {nearest}"


def _work_ratio(pass_name: str, kernel: tuple[int, int], d: int, dv: int) -> float:
    """Return the flop of CUDA's kernels over Triton's; 1 for decode, whose time is that of reading
    k and v.
    """
    if pass_name == "decode":
        return 1.0
    spec = Spec(kernel, d, dv)
    return tile.flop_per_score(pass_name, spec) / lift.flop_per_score(pass_name, spec)


def _distance(shape: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(shape, other, strict=True))
