"""Values for the templates of Triton's kernels: where the rows and keys of a packed document lie."""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import Spec
from .backward import GradientLayout
from .pieces import axes


def matrix(spec: Spec, layout: GradientLayout, name: str, at: Sequence[str]) -> str:
    """Return the arguments that name the matrix of a packed document and where a block begins in
    it.

    Args:
        spec: the request.
        layout: layout of the gradient of the scores.
        name: the tensor.
        at: where the block begins, an index for each axis that the tensor would have for a batch.
    """
    queries, keys = axes(spec)
    slot, row, column = at[-3:]
    if name == "g":
        lengths = (queries.length, keys.length) if layout.rows_first else (keys.length, queries.length)
        return ", ".join([f"slot * g_slot{layout.document}", row, column, "g_row", *lengths])
    axis = keys if name in ("k", "v") else queries
    width = spec.head_dim if name in ("q", "k") else spec.value_head_dim
    stride = f"{name}_{'n' if len(at) == 4 else 'row'}"
    matrices = f"{slot} * {name}_h" if len(at) == 4 else f"({slot}) * {name}_slot"
    return f"{axis.first} * {stride} + {matrices}, {row}, {column}, {stride}, {axis.length}, {width}"
