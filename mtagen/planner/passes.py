"""What every plan of a pass has, whatever lowering and backend make it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import PlanError, explain
from ..spec import Spec
from .kernel import Kernel

PASSES = ("forward", "backward", "decode")
Fields: TypeAlias = Mapping[str, Any]  # JSON-ready


def passes_of(spec: Spec) -> tuple[str, ...]:
    """The passes that a spec has: packed documents and dropout are for training."""
    return PASSES[:2] if spec.packed or spec.dropout else PASSES


class PassPlan(ABC):
    """How one pass of a spec is computed on a target. Implementations are frozen dataclasses.

    What is left open by spec and target is one or more decisions, each with a key that says what it depends on and
    fields that say what was decided: tables hold them, tuning varies them, and they tell candidates from one another.

    Attributes:
        lowering: ``lift``, ``tile``, ``strip`` or ``tiled ops``.
        backend: what runs it: ``triton``, ``cuda`` or ``torch``.
        spec: the request.
        target: name of the target.
        pass_name: one of ``PASSES``.
        sums_again: whether a backward pass sums the probabilities of each row anew, see :func:`rounds_alike`.
    """

    lowering: str
    backend: str
    spec: Spec
    target: str
    pass_name: str
    sums_again: bool = False

    @property
    @abstractmethod
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score; of decode, per key."""

    @property
    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that the pass launches."""

    @abstractmethod
    def decisions(self) -> Mapping[str, Fields]:
        """What was decided, by key."""

    def check_key(self, key: str) -> None:
        """Check that there is a decision of this key.

        Raises:
            PlanError: there is none.
        """
        if key not in self.decisions():
            rule = f"is no decision of the {self.pass_name} pass by {self.backend}"
            raise PlanError(explain("decision", key, rule, tuple(self.decisions())))

    @abstractmethod
    def alternatives(self, key: str) -> Sequence[PassPlan]:
        """Plans that fit the target and differ in this decision only, this one among them; the cheapest first.

        Raises:
            PlanError: there is no such decision.
        """

    @abstractmethod
    def decided(self, key: str, fields: Fields) -> PassPlan:
        """The plan with this decision taken so.

        Raises:
            PlanError: it is not legal here, or there is no such decision.
        """

    @abstractmethod
    def decision_cost(self, key: str) -> float:
        """The part of the modelled cost that this decision changes.

        Raises:
            PlanError: there is no such decision.
        """

    @abstractmethod
    def rows_of_table(self) -> Iterable[tuple[str, str, str]]:
        """Facts for the plan's table, as (section, name, value)."""


def rounds_alike(forward: PassPlan, backward: PassPlan) -> bool:
    """Whether a backward pass may follow a forward pass: the only pairs that a plan has.

    The backward pass takes P = exp(C - lse), where C are its own scores and lse is the forward pass's. Lowerings and
    backends round scores differently, and then a row of P does not sum to 1: gradients lose the accuracy of either. So
    both passes are of one lowering and backend, or the backward pass sums each row of P anew.
    """
    alike = (forward.lowering, forward.backend) == (backward.lowering, backward.backend)
    return alike or backward.sums_again


def check_convolves_only(spec: Spec, backend: str) -> None:
    """Check that a lowering that convolves scores before the softmax, and nothing else, can make a spec.

    Raises:
        PlanError: there are other stages.
    """
    for name in ("mixed_heads", "post_kernel", "post_mixed_heads"):
        if (stage := getattr(spec, name)) is not None:
            rule = f"{backend} has no kernels for this stage"
            raise PlanError(explain(name, stage, rule, "None, or backend='triton'"))


def describe(fields: Fields) -> str:
    """Fields as a line of text, such as ``warps=12 keys=64``."""
    return " ".join(f"{name}={value}" for name, value in fields.items())
