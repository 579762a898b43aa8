"""What templates of Triton's kernels ask of packed documents: where a document's rows and keys lie."""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import Spec
from .backward import GradientLayout
from .pieces import axes


def matrix(spec: Spec, layout: GradientLayout, name: str, at: Sequence[str]) -> str:
    """The matrix that a tile of a packed document is in, and where it begins there, as kernels' functions take it.

    Args:
        spec: the request.
        layout: of the gradient of the scores.
        name: the tensor.
        at: where the tile begins, one index for each axis of the tensor that holds batches.
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
