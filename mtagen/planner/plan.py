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
from .choice import (
    BACKENDS,
    GENERATED,
    Backend,
    Choice,
    PlannedPass,
    choose_backends,
    lowerings,
    plan_pass,
    why_unfused,
)
from .geometry.mask import Mask
from .geometry.stencil import pipeline_stencil
from .heads.kernels import HeadsKernel
from .heads.passes import HeadsForward, why_not_forward
from .lift.passes import LiftPass
from .names import suffix
from .passes import Fields, PassPlan, describe, passes_of, rounds_alike
from .strip.passes import StripPass
from .strip.source import StripSource
from .tables import Table, shipped
from .targets import TARGETS, Target, get_target
from .tile.passes import TilePass


@dataclass(frozen=True)
class Plan:
    """How one spec is computed on one target. Comparable, hashable, printable, and convertible to
    JSON.

    Attributes:
        spec: the request.
        target: name of the target.
        passes: forward, backward, and decode if the spec has it.
    """

    spec: Spec
    target: str
    passes: tuple[PlannedPass, ...]

    @property
    def backend(self) -> str:
        """The backend of all passes, or several such as ``cuda+triton``."""
        used = {planned.backend for planned in self.passes}
        return "+".join(backend for backend in BACKENDS if backend in used)

    @property
    def reason(self) -> str:
        """The reason for the backend, or the reason for each pass if they differ."""
        reasons = {planned.reason for planned in self.passes}
        if len(reasons) == 1:
            return reasons.pop()
        return "; ".join(f"{planned.plan.pass_name}: {planned.reason}" for planned in self.passes)

    def served_by(self, backend: str) -> tuple[str, ...]:
        """Return the passes that ``backend`` computes."""
        return tuple(planned.plan.pass_name for planned in self.passes if planned.backend == backend)

    def __getitem__(self, pass_name: str) -> PassPlan:
        """Return the plan of a pass."""
        return next(planned.plan for planned in self.passes if planned.plan.pass_name == pass_name)

    @cached_property
    def tile(self) -> Mapping[str, TilePass]:
        """The passes of the lowering "tile", by name."""
        plans = (planned.plan for planned in self.passes)
        return {plan.pass_name: plan for plan in plans if isinstance(plan, TilePass)}

    @cached_property
    def lift(self) -> Mapping[str, LiftPass]:
        """The passes of the lowering "lift", by name."""
        plans = (planned.plan for planned in self.passes)
        return {plan.pass_name: plan for plan in plans if isinstance(plan, LiftPass)}

    @cached_property
    def strip(self) -> Mapping[str, StripPass]:
        """The passes of the lowering "strip", by name."""
        plans = (planned.plan for planned in self.passes)
        return {plan.pass_name: plan for plan in plans if isinstance(plan, StripPass)}

    @cached_property
    def heads(self) -> Mapping[str, HeadsForward]:
        """The passes of the lowering "heads", by name."""
        plans = (planned.plan for planned in self.passes)
        return {plan.pass_name: plan for plan in plans if isinstance(plan, HeadsForward)}

    @cached_property
    def cuda(self) -> Mapping[str, TilePass | HeadsKernel | StripSource]:
        """The plans from which CUDA sources are printed, by role: fused passes, and kernels of
        strips and of mixings on the chip.
        """
        passes: tuple[TilePass | HeadsForward | StripPass, ...]
        passes = (*self.tile.values(), *self.heads.values(), *self.strip.values())
        return {role: source for plan in passes for role, source in plan.cuda.items()}

    @property
    def unmixed_columns(self) -> int:
        """Columns of the unmixed outputs that the forward pass keeps for the backward pass; 0 if it keeps none."""
        return self.strip["backward"].unmixed_columns if "backward" in self.strip else 0

    @property
    def triton(self) -> tuple[str, ...]:
        """The passes whose host functions and at least some kernels are in a Triton module."""
        return (*self.lift, *self.strip)

    @property
    def suffix(self) -> str:
        """The part of kernel names that tells plans apart, e.g. ``cq6_ck11_d128_bf16_causal_sm90a``."""
        return suffix(self.spec, self.target)

    @property
    def name(self) -> str:
        """The name of the plan, which the names of its generated modules extend by the lowering."""
        return f"mta_{self.suffix}"

    def replaced(self, changed: PassPlan) -> Plan:
        """Return the plan with another plan of one pass."""
        passes = (
            PlannedPass(changed, planned.reason, planned.sources)
            if planned.plan.pass_name == changed.pass_name
            else planned
            for planned in self.passes
        )
        return Plan(self.spec, self.target, tuple(passes))

    def decided(self, key: str, fields: Fields) -> Plan:
        """Return the plan with this decision in all passes that have it, because they may share a
        kernel.
        """
        result = self
        for planned in self.passes:
            if key in planned.plan.decisions():
                result = result.replaced(planned.plan.decided(key, fields))
        return result

    def flops_per_score(self) -> dict[str, int]:
        """Return the flop per (row, key) pair of each training pass and of plain attention.

        A multiply-add is 2 flop.
        """
        flop = {}
        for plan in (planned.plan for planned in self.passes if planned.plan.pass_name != "decode"):
            lowering = lowerings(plan.backend, self.spec)[plan.lowering]
            flop[plan.pass_name] = lowering.flop_per_score(plan.pass_name, self.spec)
        return flop | {"plain attention forward": 2 * (self.spec.head_dim + self.spec.value_head_dim)}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; :meth:`from_dict` inverts it."""
        return {
            "spec": self.spec.to_dict(),
            "target": self.target,
            "passes": {planned.plan.pass_name: planned.to_dict() for planned in self.passes},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Return the plan that :meth:`to_dict` made ``fields`` from.

        Raises:
            PlanError: this version of mtagen cannot take one of the decisions, or this backward pass after this
                forward pass.
        """
        spec, target = Spec.from_dict(fields["spec"]), fields["target"]
        passes = (PlannedPass.from_dict(name, spec, target, planned) for name, planned in fields["passes"].items())
        plan = cls(spec, target, tuple(passes))
        if {"forward", "backward"} <= fields["passes"].keys() and not rounds_alike(plan["forward"], plan["backward"]):
            got = tuple(f"{planned.backend} by {planned.plan.lowering}" for planned in plan.passes[:2])
            rule = "the forward and the backward pass do not round scores alike"
            raise PlanError(explain("passes", got, rule, "a plan that this version of mtagen makes"))
        return plan

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that :meth:`to_json` made ``text`` from."""
        return cls.from_dict(json.loads(text))

    def table(self) -> list[tuple[str, str, str]]:
        """Return the decisions and their reasons, as (section, name, value) rows."""
        spec = self.spec
        rows = [
            *(("request", name, value) for name, value in _stages(spec)),
            ("request", "head dims", f"{spec.head_dim} (values {spec.value_head_dim})"),
            ("request", "mask", f"{Mask.of(spec).name}, {spec.mask}"),
            *(("request", place, text) for place, text in spec.expressions),
            *([("request", "visible", spec.visible)] if spec.visible else []),
            ("request", "key padding", spec.key_padding),
            ("request", "dtype", spec.dtype),
            ("choice", "target", self.target),
        ]
        if len({(planned.backend, planned.reason) for planned in self.passes}) == 1:
            rows.append(("choice", "backend", f"{self.backend}: {self.reason}"))
        else:
            rows += [
                ("choice", f"{planned.plan.pass_name} backend", f"{planned.backend}: {planned.reason}")
                for planned in self.passes
            ]
        for reason in dict.fromkeys(why_unfused(spec, strip.backend) for strip in self.strip.values()):
            rows += [("choice", "lowering", f"strip: {reason}")] if reason else []
        strips = self.strip.get("forward")
        if spec.mixed and strips and strips.backend == "cuda":
            rows.append(("choice", "forward lowering", f"strip: {_why_not_heads(strips)}"))
        forward = pipeline_stencil(spec)
        backward = forward.then(forward.adjoint())
        for name, stencil in (("forward", forward), ("backward", backward)):
            above, below, left, right = stencil.halo
            rows.append(("stencil", f"{name} halo", f"rows {above} + {below}, keys {left} + {right}"))
        rows += [("cost", f"flop per score, {name}", str(flop)) for name, flop in self.flops_per_score().items()]
        for planned in self.passes:
            pass_name, decisions = planned.plan.pass_name, planned.plan.decisions()
            rows += [(pass_name, key, f"{describe(decisions[key])} ({source})") for key, source in planned.sources]
            rows += planned.plan.rows_of_table()
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


def _why_not_heads(strips: StripPass) -> str:
    """Return the reason why strips make the forward pass of heads that mix, instead of the lowering "heads"."""
    if reason := why_not_forward(strips.spec, get_target(strips.target)):
        return reason
    is_faster = strips.cost <= HeadsForward(strips.spec, strips.target).cost
    return "expected to be faster than heads" if is_faster else "a table names it"


def _stages(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the stages of a pipeline as (name, value), for the table."""
    for when, kernel, mixed, ranks in (
        ("before the softmax", spec.kernel, spec.mixed_heads, spec.dynamic_ranks),
        ("after the softmax", spec.post_kernel, spec.post_mixed_heads, spec.post_dynamic_ranks),
    ):
        if kernel:
            (cq, ck), (left, right) = kernel, spec.padding(kernel[1])
            yield f"convolution {when}", f"{cq} x {ck}, {left} keys left, {right} right"
        if mixed:
            dynamic = ", matrices of rank {} of queries and {} of keys".format(*ranks) if ranks else ""
            yield f"mixture {when}", f"groups of {mixed} heads{dynamic}"


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
        backend: ``cuda``, ``triton``, ``torch``, or ``auto``. On GPUs ``auto`` takes the generated
            kernels that are expected to be faster, for each pass; on the CPU it takes tiled PyTorch
            ops.
        available: the backends from which ``auto`` may choose on GPUs.
        tables: measured decisions. The first table that has a decision is followed. By default only
            the target's table in the package is used.

    Raises:
        SpecError: an argument is of a wrong type; the target or backend is unknown.
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
    """Check the types and values of the arguments of :func:`plan`."""
    if not isinstance(spec, Spec):
        raise SpecError(explain("spec", spec, "must be a Spec", "such as mtagen.Spec(kernel=(6, 11), head_dim=64)"))
    if not isinstance(target, (str, Target)):
        raise SpecError(explain("target", target, "must be a target or its name", ("cpu", *TARGETS)))
    if isinstance(target, str):
        names = ("cpu", *TARGETS)
        rule = (
            f"is not the name of a target; pass backend={target!r}"
            if target in BACKENDS
            else "is not the name of a target"
        )
        check_choice("target", target, names, rule)
    check_choice("backend", backend, BACKENDS, "is not the name of a backend")
    if not isinstance(available, (tuple, list, set, frozenset)) or not all(
        isinstance(name, str) and name in GENERATED for name in available
    ):
        raise SpecError(explain("available", available, "must hold backends that generate kernels", GENERATED))
    if not (tables is None or (isinstance(tables, (tuple, list)) and all(isinstance(x, Table) for x in tables))):
        rule = "must be a tuple or list of tables, or None"
        raise SpecError(explain("tables", tables, rule, "mtagen.planner.tables.Table"))
