"""The plan: every decision about one operator on one target, as a value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import PlanError, SpecError, check_choice, explain
from ..spec import Spec
from . import torch_ops
from .choice import BACKENDS, GENERATED, Backend, Choice, PlannedPass, choose_backends, lowerings, plan_pass
from .geometry.mask import Mask
from .geometry.stencil import pipeline_stencil
from .lift.passes import LiftPass
from .names import suffix
from .passes import Fields, PassPlan, describe, passes_of
from .strip.passes import StripPass
from .strip.source import StripSource
from .tables import Table, shipped
from .targets import TARGETS, Target, get_target
from .tile.passes import TilePass


@dataclass(frozen=True)
class Plan:
    """How one spec is computed on one target. Comparable, hashable, printable; JSON round trip.

    Attributes:
        spec: what was asked for.
        target: name of the target planned for.
        passes: forward, backward, and decode where the spec has it.
    """

    spec: Spec
    target: str
    passes: tuple[PlannedPass, ...]

    @property
    def backend(self) -> str:
        """The backend of all passes, or several such as ``cuda+triton``."""
        used = {one.backend for one in self.passes}
        return "+".join(backend for backend in BACKENDS if backend in used)

    @property
    def reason(self) -> str:
        """Why this backend; pass by pass if that differs."""
        reasons = {one.reason for one in self.passes}
        if len(reasons) == 1:
            return reasons.pop()
        return "; ".join(f"{one.plan.pass_name}: {one.reason}" for one in self.passes)

    def served_by(self, backend: str) -> tuple[str, ...]:
        """The passes that ``backend`` computes."""
        return tuple(one.plan.pass_name for one in self.passes if one.backend == backend)

    def __getitem__(self, pass_name: str) -> PassPlan:
        """How a pass is computed."""
        return next(one.plan for one in self.passes if one.plan.pass_name == pass_name)

    @cached_property
    def tile(self) -> Mapping[str, TilePass]:
        """The passes of the lowering "tile", by name."""
        return {one.plan.pass_name: one.plan for one in self.passes if isinstance(one.plan, TilePass)}

    @cached_property
    def lift(self) -> Mapping[str, LiftPass]:
        """The passes of the lowering "lift", by name."""
        return {one.plan.pass_name: one.plan for one in self.passes if isinstance(one.plan, LiftPass)}

    @cached_property
    def strip(self) -> Mapping[str, StripPass]:
        """The passes of the lowering "strip", by name."""
        return {one.plan.pass_name: one.plan for one in self.passes if isinstance(one.plan, StripPass)}

    @cached_property
    def cuda(self) -> Mapping[str, TilePass | StripSource]:
        """What CUDA sources are printed from, by role: of fused passes, of kernels in strips."""
        passes: tuple[TilePass | StripPass, ...] = (*self.tile.values(), *self.strip.values())
        return {role: source for one in passes for role, source in one.cuda.items()}

    @property
    def triton(self) -> tuple[str, ...]:
        """The passes whose host functions, and some kernels at least, are in a module of Triton's."""
        return (*self.lift, *self.strip)

    @property
    def suffix(self) -> str:
        """The part of kernel names that tells plans apart, e.g. ``cq6_ck11_d128_bf16_causal_sm90a``."""
        return suffix(self.spec, self.target)

    @property
    def name(self) -> str:
        """Name of the plan, and with the lowering of its generated modules."""
        return f"mta_{self.suffix}"

    def replaced(self, changed: PassPlan) -> Plan:
        """The plan with another plan of one pass."""
        passes = (
            PlannedPass(changed, one.reason, one.sources) if one.plan.pass_name == changed.pass_name else one
            for one in self.passes
        )
        return Plan(self.spec, self.target, tuple(passes))

    def decided(self, key: str, fields: Fields) -> Plan:
        """The plan with a decision taken so, by all passes that have it: they may share a kernel."""
        made = self
        for one in self.passes:
            if key in one.plan.decisions():
                made = made.replaced(one.plan.decided(key, fields))
        return made

    def flops_per_score(self) -> dict[str, int]:
        """Multiply-add flop per (row, key) pair of each training pass, and of attention without convolution."""
        flop = {}
        for one in (planned.plan for planned in self.passes if planned.plan.pass_name != "decode"):
            lowering = lowerings(one.backend, self.spec)[one.lowering]
            flop[one.pass_name] = lowering.flop_per_score(one.pass_name, self.spec)
        return flop | {"plain attention forward": 2 * (self.spec.head_dim + self.spec.value_head_dim)}

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` inverts it."""
        return {
            "spec": self.spec.to_dict(),
            "target": self.target,
            "passes": {one.plan.pass_name: one.to_dict() for one in self.passes},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_dict`.

        Raises:
            PlanError: a decision is none that this version of mtagen can take.
        """
        spec, target = Spec.from_dict(fields["spec"]), fields["target"]
        passes = (PlannedPass.from_dict(name, spec, target, one) for name, one in fields["passes"].items())
        return cls(spec, target, tuple(passes))

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    def table(self) -> list[tuple[str, str, str]]:
        """What was decided and why, as (section, name, value) rows."""
        spec = self.spec
        rows = [
            *(("request", name, value) for name, value in _stages(spec)),
            ("request", "head dims", f"{spec.head_dim} (values {spec.value_head_dim})"),
            ("request", "mask", f"{Mask.of(spec).name}, {spec.mask}"),
            ("request", "key padding", spec.key_padding),
            ("request", "dtype", spec.dtype),
            ("choice", "target", self.target),
        ]
        if len({(one.backend, one.reason) for one in self.passes}) == 1:
            rows.append(("choice", "backend", f"{self.backend}: {self.reason}"))
        else:
            rows += [("choice", f"{one.plan.pass_name} backend", f"{one.backend}: {one.reason}") for one in self.passes]
        forward = pipeline_stencil(spec)
        backward = forward.then(forward.adjoint())
        for name, stencil in (("forward", forward), ("backward", backward)):
            above, below, left, right = stencil.halo
            rows.append(("stencil", f"{name} halo", f"rows {above} + {below}, keys {left} + {right}"))
        rows += [("cost", f"flop per score, {name}", str(flop)) for name, flop in self.flops_per_score().items()]
        for one in self.passes:
            decisions = one.plan.decisions()
            rows += [(one.plan.pass_name, key, f"{describe(decisions[key])} ({source})") for key, source in one.sources]
            rows += one.plan.rows_of_table()
        return rows

    def __str__(self) -> str:
        rows = self.table()
        width = max(len(name) for _, name, _ in rows)
        lines, section = [self.name], ""
        for head, name, value in rows:
            lines += [] if head == section else [f"  {head}"]
            lines.append(f"    {name:<{width}}  {value}")
            section = head
        return "\n".join(lines)


def _stages(spec: Spec) -> Iterator[tuple[str, str]]:
    """The stages of a pipeline, for the table."""
    for when, kernel, mixed in (
        ("before the softmax", spec.kernel, spec.mixed_heads),
        ("after the softmax", spec.post_kernel, spec.post_mixed_heads),
    ):
        if kernel:
            (cq, ck), (left, right) = kernel, spec.padding(kernel[1])
            yield f"convolution {when}", f"{cq} x {ck}, {left} keys left, {right} right"
        if mixed:
            yield f"mixture {when}", f"groups of {mixed} heads"


def plan(
    spec: Spec,
    target: str | Target = "sm_90a",
    backend: Backend = "auto",
    available: Collection[str] = GENERATED,
    tables: Sequence[Table] | None = None,
) -> Plan:
    """Decide everything about ``spec`` on ``target``.

    Args:
        spec: the request.
        target: a target, its name, or ``"cpu"``.
        backend: ``cuda``, ``triton``, ``torch``, or ``auto``: on GPUs the generated kernels expected to be faster, pass
            by pass; on the CPU tiled PyTorch ops.
        available: the backends that ``auto`` may choose from on GPUs.
        tables: measured decisions, the first that has one is followed; by default the target's table in the package.

    Raises:
        SpecError: an argument is of a wrong type; unknown target or backend.
        PlanError: the backend cannot do this spec on this target; the message names the limit.
    """
    _check_arguments(spec, target, backend, available, tables)
    if target == "cpu":
        if backend in GENERATED:
            raise PlanError(explain("backend", backend, "compiles for GPUs only", "backend='torch', or a GPU target"))
        reason = "the CPU runs tiled PyTorch ops" if backend == "auto" else "asked for"
        passes = (PlannedPass(torch_ops.from_fields(name, spec, "cpu", {}), reason, ()) for name in passes_of(spec))
        return Plan(spec, "cpu", tuple(passes))
    target = target if isinstance(target, Target) else get_target(target)
    tables = (shipped(target.name),) if tables is None else tables
    if backend == "auto":
        choices = choose_backends(spec, target, available, tables)
    else:
        choices = tuple(Choice(name, backend, "asked for") for name in passes_of(spec))
    return Plan(spec, target.name, tuple(plan_pass(choice, spec, target, tables) for choice in choices))


def _check_arguments(spec: object, target: object, backend: object, available: object, tables: object) -> None:
    """Refuse what :func:`plan` cannot take, before anything asks it a question that it cannot answer."""
    if not isinstance(spec, Spec):
        raise SpecError(explain("spec", spec, "must be a Spec", "such as mtagen.Spec(kernel=(6, 11), head_dim=64)"))
    if not isinstance(target, (str, Target)):
        raise SpecError(explain("target", target, "must be a target or its name", ("cpu", *TARGETS)))
    if isinstance(target, str):
        names = ("cpu", *TARGETS)
        rule = f"is not known; backend={target!r} says how to compute" if target in BACKENDS else "is not known"
        check_choice("target", target, names, rule)
    check_choice("backend", backend, BACKENDS, "is not built")
    if not isinstance(available, (tuple, list, set, frozenset)) or not all(
        isinstance(one, str) and one in GENERATED for one in available
    ):
        raise SpecError(explain("available", available, "must hold backends that generate kernels", GENERATED))
    if not (tables is None or (isinstance(tables, (tuple, list)) and all(isinstance(one, Table) for one in tables))):
        rule = "must be a tuple or list of tables, or None"
        raise SpecError(explain("tables", tables, rule, "mtagen.planner.tables.Table"))
