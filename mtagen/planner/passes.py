"""The interface of a pass's plan, common to all lowerings and backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import PlanError, explain
from ..spec import Spec
from .geometry.pairs import PairCondition
from .kernel import Kernel

PASSES = ("forward", "backward", "decode")
Fields: TypeAlias = Mapping[str, Any]  # JSON-ready


def passes_of(spec: Spec) -> tuple[str, ...]:
    """Return the passes of a spec.

    With packed documents or dropout it has no decode pass. With pages it has one pass: decode, or
    for packed documents forward.
    """
    if spec.page_size:
        return PASSES[:1] if spec.packed else PASSES[2:]
    return PASSES[:2] if spec.packed or spec.dropout else PASSES


class PassPlan(ABC):
    """How one pass of a spec is computed on a target. Implementations are frozen dataclasses.

    A plan consists of one or more decisions. The key of a decision names everything that it depends
    on; the fields of a decision are what was decided. Tables store decisions, tuning varies them,
    and candidates differ in them.

    Attributes:
        lowering: ``lift``, ``tile``, ``strip``, ``heads`` or ``tiled ops``.
        backend: ``triton``, ``cuda`` or ``torch``.
        spec: the request.
        target: name of the target.
        pass_name: one of ``PASSES``.
        rounds_as: the lowering whose scores are rounded like those of this pass; empty for its own.
        sums_again: whether a backward pass normalises each row of P again, see :func:`rounds_alike`.
    """

    lowering: str
    backend: str
    spec: Spec
    target: str
    pass_name: str
    rounds_as: str = ""
    sums_again: bool = False

    @property
    @abstractmethod
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score; for decode, per key."""

    @property
    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that the pass launches."""

    @abstractmethod
    def decisions(self) -> Mapping[str, Fields]:
        """Return the fields of each decision, by key."""

    def check_key(self, key: str) -> None:
        """Check that the plan has a decision with this key.

        Raises:
            PlanError: the plan has no such decision.
        """
        if key not in self.decisions():
            rule = f"is no decision of the {self.pass_name} pass by {self.backend}"
            raise PlanError(explain("decision", key, rule, tuple(self.decisions())))

    @abstractmethod
    def alternatives(self, key: str) -> Sequence[PassPlan]:
        """Return the plans that fit the target and differ in this decision only, the cheapest
        first.

        This plan is one of them.

        Raises:
            PlanError: the plan has no such decision.
        """

    @abstractmethod
    def decided(self, key: str, fields: Fields) -> PassPlan:
        """Return the plan with these fields of a decision.

        Raises:
            PlanError: the fields are not legal here, or the plan has no such decision.
        """

    @abstractmethod
    def decision_cost(self, key: str) -> float:
        """Return the part of the modelled cost that this decision changes.

        Raises:
            PlanError: the plan has no such decision.
        """

    @abstractmethod
    def rows_of_table(self) -> Iterable[tuple[str, str, str]]:
        """Return facts for the plan's table, as (section, name, value)."""


def rounds_alike(forward: PassPlan, backward: PassPlan) -> bool:
    """Return whether a backward pass may follow a forward pass in a plan.

    The backward pass takes P = exp(C - lse), where C are its own scores and lse is that of the
    forward pass. If two lowerings or backends round scores differently, the rows of P do not sum to
    1, and the gradients are less accurate than those of either. So both passes must have the same
    backend and lowerings that round alike, unless the backward pass normalises each row of P again.
    """
    alike = (forward.rounds_as or forward.lowering) == (backward.rounds_as or backward.lowering)
    return (alike and forward.backend == backward.backend) or backward.sums_again


def check_convolves_only(spec: Spec, backend: str) -> None:
    """Check that a spec has no stage except a convolution before the softmax.

    Raises:
        PlanError: the spec has another stage.
    """
    for name in ("mixed_heads", "post_kernel", "post_mixed_heads"):
        if (stage := getattr(spec, name)) is not None:
            rule = f"{backend} has no kernels for this stage"
            raise PlanError(explain(name, stage, rule, "None, or backend='triton'"))


def check_learned(spec: Spec, lowering: str, supported: Collection[str] = ()) -> None:
    """Check that a lowering has what a spec asks of scores besides ``logits``.

    Args:
        spec: the request.
        lowering: its name, for the message.
        supported: what the lowering has of ``scores``, ``convolved``, ``visible``, ``parameters`` and
            ``sink``, and ``pairs`` if it checks conditions with gaps for each pair.

    Raises:
        PlanError: the lowering lacks something.
    """
    for name in ("scores", "convolved", "visible", "parameters", "sink"):
        if (asked := getattr(spec, name)) and name not in supported:
            rule = f"the lowering {lowering} has no kernels for it"
            raise PlanError(explain(name, asked, rule, "another backend, or backend='torch'"))
    if PairCondition.of(spec).is_checked and "pairs" not in supported:
        rule = f"the lowering {lowering} has no kernels for keys with gaps"
        raise PlanError(explain("visible", spec.visible, rule, "backend='triton', or backend='torch'"))
    for name, axes in spec.parameters:
        tokens, table = ({*axes.split(",")} & {"i", "j"}, any(axis.isdecimal() for axis in axes.split(",")))
        if tokens and table and (spec.packed or name not in spec.constants) and name not in spec.mask_parameters:
            why = "and kernels read none of packed documents" if spec.packed else "whose gradients kernels do not sum"
            rule = f"has a table for each token, {why}"
            legal = "a parameter for each entry, constants=(...) for batches, or backend='torch'"
            raise PlanError(explain(f"parameters[{name!r}]", axes, rule, legal))
    for name, axes in spec.parameters if spec.packed else ():
        if name in spec.mask_parameters:
            if {"i", "j"} & {*axes.split(",")}:
                rule = "counts tokens, and kernels have no masks of such parameters of packed documents"
                raise PlanError(explain(f"parameters[{name!r}]", axes, rule, "axes without i, or backend='torch'"))
        elif "b" in axes.split(",") and not {"i", "j"} & {*axes.split(",")} and name not in spec.constants:
            rule = "has a number for each document, whose gradients kernels do not sum"
            legal = "axes of tokens besides b, axes without b, constants=(...), or backend='torch'"
            raise PlanError(explain(f"parameters[{name!r}]", axes, rule, legal))


def describe(fields: Fields) -> str:
    """Return fields as a line of text, such as ``warps=12 keys=64``."""
    return " ".join(f"{name}={value}" for name, value in fields.items())
