"""The score expressions of the suite ``scores``, by name. Does not import torch."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..spec import Spec


def expressions(heads: int) -> dict[str, dict[str, Any]]:
    """Return options of :class:`mtagen.Spec` by the name of an expression, for ``heads`` heads."""
    # Imported here, because it loads sympy, and the command line's help names the suites.
    from ..expressions import alibi, clipped, forget, softcap, t5, temperature

    return {
        "softcap": {"logits": softcap(50.0)},
        "alibi": {"logits": alibi(heads)},
        "clipped distance": {"logits": "s + min(64, i - j) / 8"},
        "learned slopes": {"logits": "s - slopes[h] * (i - j)", "parameters": {"slopes": "h"}},
        "table of distances": {"logits": clipped(64), "parameters": {"table": "h,65"}},
        "t5": {"logits": t5(), "parameters": {"table": "h,32"}},
        "bias of keys": {"logits": "s + bias[b, h, j]", "parameters": {"bias": "b,h,j"}},
        "constant bias of keys": {
            "logits": "s + bias[b, h, j]",
            "parameters": {"bias": "b,h,j"},
            "constants": ("bias",),
        },
        "forget gates": {"logits": forget(), "parameters": {"gates": "b,h,j"}},
        "temperatures": {"logits": temperature(), "parameters": {"factors": "h"}},
        "sink": {"sink": True},
    }


def name_expression(spec: Spec, heads: int) -> str:
    """Return the name of a spec's expression or sink, its text if it has no name, or "" if it has neither."""
    rules = _rules(spec)
    if rules == _rules(Spec(None, spec.head_dim)):
        return ""
    texts = [f"{place} {text}" for place, text in (*spec.expressions, ("visible", spec.visible)) if text]
    return _names(heads).get(rules) or ", ".join(texts + ["sink"] * spec.sink)


@cache
def _names(heads: int) -> dict[tuple[object, ...], str]:
    return {_rules(Spec(None, 64, **options)): name for name, options in expressions(heads).items()}


def _rules(spec: Spec) -> tuple[object, ...]:
    return spec.expressions, spec.parameters, spec.constants, spec.sink, spec.visible
