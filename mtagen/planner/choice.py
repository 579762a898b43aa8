"""Which lowering makes which pass, and which of its candidates.

Backends are names that users give: ``triton`` runs the lowering "lift" (:mod:`.lift`), ``cuda`` the lowering "tile"
(:mod:`.tile`), and both the lowering "strip" (:mod:`.strip`) where there are other stages than a convolution before the
softmax; there ``cuda`` has kernels for most roles, and Triton's do the rest. A backward pass that "tile" cannot fuse,
as its head dims are too wide or differ, is one of strips if CUDA has their kernels. ``torch`` runs tiled PyTorch ops.
Where both can do a pass, ``auto`` takes the one that is expected to be faster, and CUDA where they are close: measured,
where a table (:mod:`.tables`) has the shape, else scaled from the nearest measured shape by planned work, or by the
cost models where the two differ in more than work. Forward and backward passes of one plan round scores alike
(:func:`.passes.rounds_alike`). Of a pass's candidates the one that a table names is taken, decision by decision, else
the cheapest by the cost model.
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
from .lift import passes as lift
from .passes import Fields, PassPlan, passes_of, rounds_alike
from .strip import passes as strip
from .tables import Shape, Table
from .targets import Target
from .tile import candidates as tile

Backend: TypeAlias = Literal["auto", "cuda", "triton", "torch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
GENERATED: tuple[Backend, ...] = ("cuda", "triton")
COST_MODEL, ONLY_ONE = "cost model", "the only one"
# CUDA's time over Triton's up to which auto takes fused kernels of CUDA: their calls take less than half of the CPU's
# time (benchmarks/notes/planning.md, "Backends"), which a busy GPU hides and short sequences do not.
CUDA_UP_TO = 1.15
INSTALL = {"cuda": "pip install 'mtagen[cuda]'", "triton": "pip install triton"}


class Lowering(Protocol):
    """What the planner asks of a lowering's modules."""

    def candidates(self, pass_name: str, spec: Spec, target: Target) -> Sequence[PassPlan]:
        """The plans of a pass, the cheapest first; raises PlanError with the reason if there is none."""

    def from_fields(self, pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> PassPlan:
        """The plan with these decisions."""

    def flop_per_score(self, pass_name: str, spec: Spec) -> int:
        """Flop per (row, key) pair of a training pass."""


def lowerings(backend: str, spec: Spec) -> Mapping[str, Lowering]:
    """A backend's lowerings for a spec by name. The first that has candidates makes a pass."""
    if backend not in GENERATED:
        return {"tiled ops": torch_ops}
    strips = {"strip": strip.LOWERINGS[backend]}
    if not spec.convolves_only:
        return strips
    return {"tile": tile, **strips} if backend == "cuda" else {"lift": lift}


def candidates(backend: str, pass_name: str, spec: Spec, target: Target) -> Sequence[PassPlan]:
    """The plans of a pass by a backend, the cheapest first.

    Raises:
        PlanError: no lowering has one; the message is the first one's.
    """
    refusals = []
    for one in lowerings(backend, spec).values():
        try:
            return one.candidates(pass_name, spec, target)
        except PlanError as refusal:
            refusals.append(refusal)
    raise refusals[0]


class Choice(NamedTuple):
    """Which backend computes a pass, and why."""

    pass_name: str
    backend: str
    reason: str


@dataclass(frozen=True)
class PlannedPass:
    """One pass of a plan.

    Attributes:
        plan: how it is computed.
        reason: why by this backend.
        sources: (key, source) of each decision: where it comes from.
    """

    plan: PassPlan
    reason: str
    sources: tuple[tuple[str, str], ...]

    @property
    def backend(self) -> str:
        """What computes it."""
        return self.plan.backend

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` inverts it."""
        sources = dict(self.sources)
        decisions = {
            key: {"fields": dict(fields), "source": sources[key]} for key, fields in self.plan.decisions().items()
        }
        made_by = {"backend": self.backend, "lowering": self.plan.lowering}
        return {**made_by, "reason": self.reason, "decisions": decisions}

    @classmethod
    def from_dict(cls, pass_name: str, spec: Spec, target: str, fields: Mapping[str, Any]) -> PlannedPass:
        """Inverse of :meth:`to_dict`."""
        decisions = {key: decision["fields"] for key, decision in fields["decisions"].items()}
        sources = tuple((key, decision["source"]) for key, decision in fields["decisions"].items())
        lowering = lowerings(fields["backend"], spec)[fields["lowering"]]
        return cls(lowering.from_fields(pass_name, spec, target, decisions), fields["reason"], sources)


def plan_pass(choice: Choice, spec: Spec, target: Target, tables: Sequence[Table]) -> PlannedPass:
    """The plan of a pass by the chosen backend: each decision as the first table that has it says, else the cheapest.

    Raises:
        PlanError: there is none; the message names the limit.
    """
    made, sources = candidates(choice.backend, choice.pass_name, spec, target)[0], {}
    for key in made.decisions():
        sources[key] = COST_MODEL if len(made.alternatives(key)) > 1 else ONLY_ONE
        for table in tables:
            if fields := table.decisions.get(key):
                try:
                    made = made.decided(key, fields)
                except PlanError:  # a table may know candidates that this version no longer has
                    continue
                sources[key] = table.source
                break
    return PlannedPass(made, choice.reason, tuple(sources.items()))


def choose_backends(
    spec: Spec, target: Target, available: Collection[str], tables: Sequence[Table]
) -> tuple[Choice, ...]:
    """What ``auto`` means on a GPU, pass by pass.

    Raises:
        PlanError: no available backend can do a pass; the message is Triton's if that is one of them.
    """
    offers = {name: _offers(name, spec, target, available, tables) for name in passes_of(spec)}
    chosen = {name: made[0] for name, made in offers.items()}
    if not rounds_alike(chosen["forward"].plan, chosen["backward"].plan):
        chosen |= _pair(offers["forward"], offers["backward"])
    return tuple(Choice(name, one.plan.backend, one.reason) for name, one in chosen.items())


class _Offer(NamedTuple):
    """One backend's plan of a pass.

    Attributes:
        plan: the plan.
        time: expected, over Triton's.
        reason: why it is the faster one, or the only one.
    """

    plan: PassPlan
    time: float
    reason: str


def _offers(
    pass_name: str, spec: Spec, target: Target, available: Collection[str], tables: Sequence[Table]
) -> list[_Offer]:
    """The plans of a pass by the backends that can make it, that which ``auto`` prefers first.

    Raises:
        PlanError: there is none.
    """
    made: dict[str, PassPlan] = {}
    refusals: dict[str, PlanError] = {}
    for backend in GENERATED:
        try:
            made[backend] = _made_by(backend, pass_name, spec, target, available)
        except PlanError as refusal:
            refusals[backend] = refusal
    if len(refusals) == len(GENERATED):
        raise refusals["triton" if "triton" in available else "cuda"]
    if "cuda" in refusals:
        return [_Offer(made["triton"], 1.0, f"not cuda: {refusals['cuda']}")]
    if "triton" in refusals:
        return [_Offer(made["cuda"], 1.0, f"not triton: {refusals['triton']}")]
    ratio, source = cuda_over_triton(made["cuda"], made["triton"], tables)
    cuda = _Offer(made["cuda"], ratio, f"{ratio:.2f} of triton's time, {source}")
    triton = _Offer(made["triton"], 1.0, f"cuda takes {ratio:.2f} of its time, {source}")
    prefers_cuda = ratio <= (1.0 if made["cuda"].lowering == "strip" else CUDA_UP_TO)
    return [cuda, triton] if prefers_cuda else [triton, cuda]


def _pair(forwards: Sequence[_Offer], backwards: Sequence[_Offer]) -> dict[str, _Offer]:
    """The fastest forward and backward pass that round scores alike.

    Raises:
        PlanError: there are none.
    """

    def time(pair: tuple[_Offer, _Offer]) -> float:
        """Expected, in the work of Triton's lowering."""
        return sum(
            one.time * next(iter(lowerings("triton", one.plan.spec).values())).flop_per_score(name, one.plan.spec)
            for name, one in zip(("forward", "backward"), pair, strict=True)
        )

    pairs = [pair for pair in product(forwards, backwards) if rounds_alike(*(one.plan for one in pair))]
    if not pairs:
        found = tuple(f"{one.plan.backend} by {one.plan.lowering}" for one in (*forwards, *backwards))
        raise PlanError(explain("backend", found, "the passes round scores differently", "backend='torch'"))
    fastest = min(pairs, key=time)
    made = {}
    for name, other, one, offers in zip(
        ("forward", "backward"), ("backward", "forward"), fastest, (forwards, backwards), strict=True
    ):
        rule = f"; {offers[0].plan.backend} would round scores otherwise than the {other} pass"
        made[name] = one if one is offers[0] else one._replace(reason=one.reason + rule)
    return made


def _made_by(backend: str, pass_name: str, spec: Spec, target: Target, available: Collection[str]) -> PassPlan:
    """The cheapest plan of a pass by an available backend.

    Raises:
        PlanError: it cannot do the pass, or is not installed.
    """
    if backend not in available:
        raise PlanError(explain("backend", backend, "is not installed", INSTALL[backend]))
    made = candidates(backend, pass_name, spec, target)[0]
    if made.lowering == "strip" and "triton" not in available:
        rule = "runs beside Triton's kernels, which are not installed"
        raise PlanError(explain("backend", backend, rule, INSTALL["triton"]))
    return made


def cuda_over_triton(cuda: PassPlan, triton: PassPlan, tables: Sequence[Table]) -> tuple[float, str]:
    """Expected time of CUDA's plan of a pass over Triton's, and where the figure comes from.

    A measured shape stands for itself; another's ratio is that of the nearest one, scaled by how the ratio of planned
    work changes from there to here. Without measurements it is the ratio of planned work; of strips, which no fused
    kernel tells anything about, that of the cost models. Where there are other stages than a convolution before the
    softmax, shapes that are not measured have the largest ratio of those that are.
    """
    pass_name, spec = cuda.pass_name, cuda.spec
    here = Shape.of(spec)
    measured: dict[Shape, float] = {}
    for table in tables:
        shapes = table.cuda_over_triton.get(pass_name, {})
        if here in shapes:
            return shapes[here], table.source
        measured = {**{shape: ratio for shape, ratio in shapes.items() if not shape.stages}, **measured}
    if not spec.convolves_only:
        return strip.cuda_over_triton(pass_name, spec)
    if cuda.lowering == "strip":
        return cuda.cost / triton.cost, "by the cost models"
    work = _work_ratio(pass_name, (spec.cq, spec.ck), spec.head_dim, spec.value_head_dim)
    if not measured:
        return work, "by planned work"
    nearest = min(measured, key=lambda shape: (shape.mask != here.mask, _distance(shape[:3], here[:3]), shape))
    cq, ck, d, *_ = nearest
    ratio = measured[nearest] * work / _work_ratio(pass_name, (cq, ck), d, nearest.value_head_dim or d)
    return ratio, f"scaled from {nearest}"


def _work_ratio(pass_name: str, kernel: tuple[int, int], d: int, dv: int) -> float:
    """Flop of CUDA's kernels over Triton's; decode's time is that of reading keys and values, whoever does it."""
    if pass_name == "decode":
        return 1.0
    spec = Spec(kernel, d, dv)
    return tile.flop_per_score(pass_name, spec) / lift.flop_per_score(pass_name, spec)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))
