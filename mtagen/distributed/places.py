"""Masks of calls on a part of a sequence: conditions whose positions and keys count from the sequence's begin."""

from __future__ import annotations

import ast
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, explain
from ..expressions.language import KEY, POSITION
from ..expressions.parameters import read_parameters
from ..ops.attention import AttentionOp
from ..spec import PARAMETER_SLOTS, Spec
from .sharding import ChunkCall

# The parameters that a call adds to a position and to a key, as its condition counts them.
_BEFORE = {str(POSITION): "positions_before", str(KEY): "keys_before"}


class Before(NamedTuple):
    """Offsets from a call's own places to those in the sequence, ``(B,)`` or ``(documents,)`` int32.

    Attributes:
        positions: the position of a query in its sequence, less that in the call.
        keys: the number of keys of the sequence before the call's first key.
    """

    positions: Tensor
    keys: Tensor

    @classmethod
    def of(cls, call: ChunkCall, q: Tensor, boundaries: Tensor | None = None) -> Before:
        """Return what the call for a chunk adds.

        Args:
            call: its rows of queries and of keys.
            q: its queries.
            boundaries: ``(documents + 1,)`` int32, the first row of each packed document, and the end of the last; None
                for a batch.
        """
        if boundaries is None:
            places = call.queries.start - (call.keys.count - call.queries.count), call.keys.start
            return cls(*(torch.full(q.shape[:1], n, dtype=torch.int32, device=q.device) for n in places))
        queries, keys = (boundaries.clamp(rows.start, rows.stop) for rows in (call.queries, call.keys))
        begin = boundaries[:-1]
        # A call aligns the queries of each sequence to the end of its keys.
        aligned = keys.diff() - queries.diff()
        return cls(queries[:-1] - begin - aligned, keys[:-1] - begin)

    def parameters(self, spec: Spec) -> dict[str, Any]:
        """Return the fields of a call of an op that :func:`of_parts` has made."""
        slots = dict(zip((name for name, _ in spec.parameters), PARAMETER_SLOTS, strict=False))
        named = zip(_BEFORE.values(), self, strict=True)
        return {slots[name]: x.contiguous() for name, x in named if name in slots}


def of_parts(op: AttentionOp) -> AttentionOp:
    """Return the op for calls on a part of a sequence, which take the :class:`Before` of each call.

    Raises:
        InputError: the condition reads a parameter by position or key, the op has too many parameters, or it was made
            from a plan by hand.
    """
    spec = op.plan.spec
    if spec.visible is None:
        return op
    for parameter in read_parameters(spec.parameters):
        if parameter.name in spec.mask_parameters and {*parameter.axes} - {"b"}:
            rule = "visible reads it by position or key, which ranks count from the first key that they have"
            legal = "parameters of the axis b, or of none"
            raise InputError(explain(f"parameters[{parameter.name!r}]", parameter.text, rule, legal))
    tree = _Shifted().visit(ast.parse(spec.visible, mode="eval"))
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    read = [before for before in _BEFORE.values() if before in named]
    names = [name for name, _ in spec.parameters]
    if len(names) + len(read) > len(PARAMETER_SLOTS) or {*names} & {*read}:
        rule = f"ranks add the parameters {', '.join(read)} to an op with visible"
        legal = f"at most {len(PARAMETER_SLOTS) - len(read)} parameters of other names"
        raise InputError(explain("parameters", names, rule, legal))
    if op._build_again is None:
        rule = "has visible and was made from a plan by hand, and ranks build another op for their parts"
        raise InputError(explain("op", op, rule, "what mtagen.build returns"))
    parameters = {**dict(spec.parameters), **dict.fromkeys(read, "b")}
    changes = {"causal": spec.causal, "window": spec.window, "visible": ast.unparse(tree), "parameters": parameters}
    return partial(op._build_again, **changes)()


class _Shifted(ast.NodeTransformer):
    """Adds what is before a call's places to the places of a condition."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _BEFORE:
            return node
        before = ast.Subscript(ast.Name(_BEFORE[node.id]), ast.Name("b"))
        return ast.BinOp(node, ast.Add(), before)
