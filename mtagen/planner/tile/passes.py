"""The base class of plans of the lowering "tile"."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, cached_property

from ...errors import PlanError, explain
from ...spec import Spec
from ..kernel import Argument, reads
from ..passes import Fields, PassPlan, describe
from ..targets import Target, get_target
from .layout import Layout


class TilePass(PassPlan):
    """One pass made of CUDA kernels. It has one decision.

    Attributes:
        template: the template of its source.
    """

    lowering = "tile"
    backend = "cuda"
    template: str
    splits = False  # whether CTAs take splits of the keys
    shares_keys = False  # whether what keys add to scores is computed once for all warps
    shares_distances = False  # whether warps compute what distances add to scores once, and share it
    starts_sums = False  # whether sums of the convolution start at what a row adds to its exponents
    grows = False  # whether what places add to exponents grows by the same from key to key
    counts_exponents = False  # whether a restart begins with exponents of 2, instead of scores

    @property
    def shares_places(self) -> bool:
        """Whether what places add to scores is computed once, and shared."""
        return self.shares_keys or self.shares_distances

    @property
    def adds_places_apart(self) -> bool:
        """Whether what places add to exponents is added apart from the rest of the function of scores."""
        return self.shares_places or self.grows

    @cached_property
    def layout(self) -> Layout:
        """The layout of sequences."""
        return Layout.of(self.spec)

    @property
    def sequence(self) -> str:
        """The struct of a CTA's sequence."""
        return self.layout.sequence

    @property
    def tables(self) -> tuple[Argument, ...]:
        """Pointers to the mask's tables; none if the mask is a window."""
        return reads("int", *(table.name for table in self.spec.tables(self.pass_name)))

    @property
    def places(self) -> tuple[Argument, ...]:
        """The arguments that say where sequences lie and what their rows see, as the struct takes them."""
        return (*self.layout.places, *self.tables)

    @property
    def cuda(self) -> Mapping[str, TilePass]:
        """The plans from which the pass's sources are printed, by role."""
        return {self.pass_name: self}

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the source file."""

    @abstractmethod
    def kernel_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield facts about the main kernel for the plan's table."""

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        """Yield facts for the plan's table."""
        yield from self.kernel_rows()

    @classmethod
    @abstractmethod
    def fitting(cls, spec: Spec, target: Target) -> Sequence[TilePass]:
        """Return the plans that fit the target.

        Raises:
            PlanError: no plan fits; the message names the limit.
        """

    @property
    def fields(self) -> Fields:
        """The fields of the decision: all fields except spec and target."""
        names = (field.name for field in fields(self) if field.name not in ("spec", "target"))  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> str:
        """The key of the decision."""
        spec = self.spec
        shape = f"cq{spec.cq} ck{spec.ck} d{spec.head_dim} dv{spec.value_head_dim}"
        return f"{self.lowering} {self.pass_name} {shape} {spec.dtype}"

    def decisions(self) -> Mapping[str, Fields]:
        return {self.key: self.fields}

    def alternatives(self, key: str) -> Sequence[TilePass]:
        self.check_key(key)
        return ranked(type(self), self.spec, get_target(self.target))

    def decided(self, key: str, fields: Fields) -> TilePass:
        candidates = self.alternatives(key)
        for candidate in candidates:
            if candidate.fields == fields:
                return candidate
        legal = [describe(candidate.fields) for candidate in candidates]
        raise PlanError(explain(key, describe(fields), f"is no candidate on {self.target}", legal))

    def decision_cost(self, key: str) -> float:
        self.check_key(key)
        return self.cost


@cache
def ranked(kind: type[TilePass], spec: Spec, target: Target) -> tuple[TilePass, ...]:
    """Return the plans that fit, the cheapest by the cost model first.

    Raises:
        PlanError: no plan fits; the message names the limit.
    """
    return tuple(sorted(kind.fitting(spec, target), key=lambda candidate: candidate.cost))
