"""Templates read only attributes that the planner's classes have, and only names that they are given.

Jinja would tell when a template is rendered, and then only of the branches that the spec takes. These tests read all
branches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest import mock

import jinja2
from jinja2 import meta, nodes
from on_chip import mixed_on_chip

from mtagen import Spec, codegen, plan
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.geometry.score import ScoreStage

MIXED: dict[str, Any] = {"mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 4}
REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({"kernel": None, "head_dim": 64, "mixed_heads": 16, "dynamic_ranks": (2, 2)}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64}, "sm_80", "cuda"),
    ({"kernel": (6, 11), "head_dim": 256}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, "packed": True, "dropout": True}, "sm_80", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, **MIXED}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, **MIXED}, "sm_80", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, **MIXED, "packed": True, "dropout": True}, "sm_90a", "cuda"),
    ({"kernel": None, "head_dim": 64, "post_mixed_heads": 4}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, "page_size": 64}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, "page_size": 64, "packed": True}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, "page_size": 64, **MIXED}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, "page_size": 64, "packed": True, **MIXED}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, "page_size": 64}, "sm_90a", "triton"),
    ({"kernel": (6, 11), "head_dim": 64, "page_size": 64, "packed": True}, "sm_90a", "triton"),
    ({"kernel": (6, 11), "head_dim": 64}, "sm_80", "triton"),
    ({"kernel": (6, 11), "head_dim": 64, "visible": "i // 64 == j // 64"}, "sm_90a", "cuda"),
    ({"kernel": (6, 11), "head_dim": 64, **MIXED}, "sm_80", "triton"),
]


@dataclass(frozen=True)
class Use:
    """A template and what it is rendered with."""

    environment: jinja2.Environment
    template: str
    context: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Which class of the planner the template is rendered from."""
        rendered = self.types.get("plan") or self.types.get("module") or Spec
        return f"{self.template}-{rendered.__name__}{'-packed' * self.context['spec'].packed}"

    @property
    def types(self) -> dict[str, type]:
        """The class of each name that stands for a value of mtagen."""
        types = {name: type(value) for name, value in self.context.items()}
        return {name: one for name, one in types.items() if one.__module__.startswith("mtagen.")}

    @cached_property
    def parts(self) -> dict[str, nodes.Template]:
        """The template, and those that it includes or imports, parsed."""
        found: dict[str, nodes.Template] = {}
        rest = [self.template]
        while rest:
            name = rest.pop()
            if name not in found:
                assert self.environment.loader
                found[name] = self.environment.parse(self.environment.loader.get_source(self.environment, name)[0])
                referring = found[name].find_all((nodes.Include, nodes.Import, nodes.FromImport))
                rest += [self._value(node.template) for node in referring]
        return found

    def _value(self, node: nodes.Node) -> Any:
        """The value of a constant, or of an attribute of the context."""
        if isinstance(node, nodes.Getattr):
            return getattr(self._value(node.node), node.attr)
        return self.context[node.name] if isinstance(node, nodes.Name) else node.as_const()  # type: ignore[attr-defined]


@cache
def uses() -> dict[str, Use]:
    """One use of each template and class, as some plans are rendered."""
    found: dict[str, Use] = {}

    def noting(template: jinja2.Template, *context: Any, **names: Any) -> str:
        assert template.name
        use = Use(template.environment, template.name, dict(*context, **names))
        found[use.id] = use
        return ""

    with mock.patch.object(jinja2.Template, "render", noting):
        for options, target, backend in REQUESTS:
            codegen.render(plan(Spec(**options), target, backend))
        for after in (None, 16):
            codegen.render(mixed_on_chip(Spec(None, 64, mixed_heads=16, post_mixed_heads=after)))
    return found


def attribute_types(owner: type, name: str) -> tuple[type, ...] | None:
    """The classes of an attribute as far as they are declared; None if no object of the class has such an attribute.

    The attribute may be that of a subclass: a template reads it where a condition says so.
    """
    found = [attribute_types(each, name) for each in owner.__subclasses__()]
    inherited = [one for each in found for one in each or ()]
    hints, member = hints_of(owner), inspect.getattr_static(owner, name, None)
    if name not in hints and member is None:
        return tuple(inherited) if any(each is not None for each in found) else None
    function = getattr(member, "fget", None) or getattr(member, "func", None)
    declared = hints[name] if name in hints else hints_of(function).get("return") if function else None
    union = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    return tuple(x for x in union if inspect.isclass(x) and x.__module__.startswith("mtagen."))


def hints_of(owner: Any) -> dict[str, Any]:
    try:
        return get_type_hints(owner)
    except (NameError, TypeError):  # hints that only type checkers can read
        return {}


class Unknown(NamedTuple):
    """An attribute that a template, or a part of it, reads of a class that lacks it."""

    part: str
    owner: type
    attribute: str


def unknown_attributes(use: Use) -> set[Unknown]:
    types: dict[str, tuple[type, ...]] = {name: (one,) for name, one in use.types.items()}
    unknown = set[Unknown]()

    def classes(name: str, node: nodes.Node, hidden: frozenset[str]) -> tuple[type, ...]:
        if isinstance(node, nodes.Name):
            return () if node.name in hidden else types.get(node.name, ())
        if not isinstance(node, nodes.Getattr):
            return ()
        owners = classes(name, node.node, hidden)
        found = [attribute_types(owner, node.attr) for owner in owners]
        if owners and all(each is None for each in found):
            unknown.add(Unknown(name, owners[0], node.attr))
        return tuple(one for each in found for one in each or ())

    def visit(name: str, node: nodes.Node, hidden: frozenset[str]) -> None:
        """Check a node and those below it, where some names are parameters and the like."""
        if isinstance(node, (nodes.Macro, nodes.CallBlock)):
            hidden |= {argument.name for argument in node.args}
        if isinstance(node, nodes.For):
            hidden |= {target.name for target in node.target.find_all(nodes.Name)} | names_of(node.target)
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            types[node.target.name] = classes(name, node.node, hidden)
        if isinstance(node, nodes.Getattr):
            classes(name, node, hidden)
        for child in node.iter_child_nodes():
            visit(name, child, hidden)

    for name, part in use.parts.items():
        visit(name, part, frozenset())
    return unknown


def names_of(target: nodes.Node) -> set[str]:
    return {target.name} if isinstance(target, nodes.Name) else set()


def test_attributes_exist() -> None:
    """A property of the planner that is renamed is renamed in the templates.

    A part that several templates have may read, on a condition, what only some of their classes have.
    """
    missing = set()
    for part, owner, attribute in set[Unknown]().union(*map(unknown_attributes, uses().values())):
        roots = [use.types["plan"] for use in uses().values() if part in use.parts and "plan" in use.types]
        if owner not in roots or all(attribute_types(root, attribute) is None for root in roots):
            missing.add(f"{part} reads {owner.__name__}.{attribute}")
    assert not missing


def test_names_are_given() -> None:
    """Each name is in the context, or is set or imported in a template that is rendered with it."""
    missing = set()
    for use in uses().values():
        known = {*use.context, *use.environment.globals}
        for part in use.parts.values():
            imported = [x for each in part.find_all(nodes.FromImport) for x in each.names]
            known |= {x if isinstance(x, str) else x[-1] for x in imported}
            known |= {x.name for x in part.find_all(nodes.Name) if x.ctx == "store"}
            known |= {x.name for x in part.find_all(nodes.Macro)} | {x.target for x in part.find_all(nodes.Import)}
        for name, part in use.parts.items():
            missing |= {f"{name} reads {x}" for x in meta.find_undeclared_variables(part) - known}
    assert not missing


def test_every_template_is_checked() -> None:
    checked = {name for use in uses().values() for name in use.parts}
    listed = {name for use in uses().values() for name in use.environment.list_templates()}
    assert {name for name in listed if name.endswith(".j2")} == {name for name in checked if name.endswith(".j2")}


def test_a_missing_attribute_is_found() -> None:
    """Also where another name stands for a value; parameters and variables of loops are other values."""
    source = (
        "{% set seen = score.visible %}{{ seen.left + seen.lift + score.visible.right }}{{ spec.head_dims }}"
        "{% macro f(score) %}{{ score.any }}{% endmacro %}{% for spec in score.rows %}{{ spec.any }}{% endfor %}"
    )
    environment, spec = jinja2.Environment(loader=jinja2.DictLoader({"one": source})), Spec(None, 16)
    assert unknown_attributes(Use(environment, "one", {"spec": spec, "score": ScoreStage.of(spec)})) == {
        Unknown("one", Mask, "lift"),
        Unknown("one", Spec, "head_dims"),
        Unknown("one", ScoreStage, "rows"),
    }
