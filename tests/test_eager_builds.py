"""What ``build`` builds at once, what the first call that needs it builds, and for what."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import mtagen
from mtagen.ops import attention, library
from mtagen.ops.attention import AttentionOp
from mtagen.planner import Plan
from mtagen.runtime.load import Passes


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is launched here")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans whose kernels are compiled and loaded from now on."""
    plans: list[Plan] = []

    def passes(planned: Plan, sources: Any) -> Passes:
        assert set(sources.hosts) == {one.plan.pass_name for one in planned.passes}
        plans.append(planned)
        return Passes(never, never)

    monkeypatch.setattr(attention, "_passes", passes)
    return plans


def build(**options: Any) -> AttentionOp:
    return mtagen.build(**{"kernel": (2, 3), "head_dim": 32, "target": "sm_80", "dtype": "fp16"} | options)


def variants(plans: list[Plan]) -> list[tuple[bool, bool]]:
    return [(made.spec.packed, made.spec.dropout) for made in plans]


@pytest.mark.parametrize(("packed", "dropout"), [*product((False, True), repeat=2)])
def test_what_is_asked_for_is_built_at_once(built: list[Plan], packed: bool, dropout: bool) -> None:
    """All that a call may then need: neither documents nor dropout, either, and both."""
    build(packed=packed, dropout=dropout)
    expected = {
        (with_documents and packed, drops and dropout) for with_documents, drops in product((True, False), repeat=2)
    }
    assert sorted(variants(built)) == sorted(expected)


def test_the_rest_is_built_once_when_a_call_needs_it(built: list[Plan]) -> None:
    op = build(packed=True)
    kernels = library.executor_of(op._key).variants
    for _ in range(2):
        kernels(True, False, None)
        assert len(built) == 2
    for _ in range(2):
        kernels(True, True, None)
        assert variants(built)[2:] == [(True, True)]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_variants_are_built_like_the_op(built: list[Plan], backend: str) -> None:
    """For its target, by its backend and of its spec in all else."""
    op = build(backend=backend, target="sm_89", window=(9, 0), packed=True, dropout=True)
    assert [(made.target, made.backend) for made in built] == [("sm_89", backend)] * 4
    first, *others = [made.spec.to_dict() for made in built]
    assert first == op.plan.spec.to_dict()
    for spec in others:
        assert first | {name: spec[name] for name in ("packed", "dropout")} == spec


def test_an_assembled_plan_has_variants_of_its_backend(built: list[Plan]) -> None:
    """Where nobody says how to plan them, as ``mtagen.check`` of a plan does not."""
    planned = mtagen.plan(mtagen.Spec((2, 3), 32), "sm_80", "triton")
    attention.assemble(planned, packed=True)
    assert [(made.spec.packed, made.backend, made.target) for made in built] == [
        (False, "triton", "sm_80"),
        (True, "triton", "sm_80"),
    ]


def test_the_torch_backend_builds_nothing(built: list[Plan]) -> None:
    build(backend="torch", target="cpu", packed=True, dropout=True)
    assert built == []
