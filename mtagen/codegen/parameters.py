"""Texts about the parameters of the function of scores, and about their gradients, for kernels and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.geometry.score import ParameterSum, ScoreStage, View
from ..spec import Spec


def learned(spec: Spec) -> Sequence[str]:
    """Return the host's names of the sink and the parameters, in the order of calls."""
    return (*(["sink"] if spec.sink else []), *(view.argument for view in ScoreStage.of(spec).views))


def parts_call(stage: ScoreStage, head: str, entry: str, first_key: str, tokens: str, n_heads: str) -> str:
    """Return a Triton kernel's call that computes what the function of scores needs of a head.

    Args:
        stage: the function.
        head: the head of queries.
        entry: the batch entry or document.
        first_key: the first key of the sequence among the tokens of parameters.
        tokens: number of tokens of parameters.
        n_heads: number of heads of queries.
    """
    if not stage.views:
        return f"_score_parts({head})"
    places = ", ".join((entry, first_key, tokens, n_heads))
    addresses = ", ".join(f"{view.argument}_ptr" for view in stage.views)
    return f"_score_parts({head}, {places}, {addresses})"


@dataclass(frozen=True)
class Sums:
    """Texts about the sums for gradients of parameters.

    Attributes:
        stage: the function of scores.
        packed: whether documents are packed.
        rows: the host's number of rows of a head.
        keys: the host's number of keys of a head.
    """

    stage: ScoreStage
    packed: bool
    rows: str
    keys: str

    def block(self, of: ParameterSum) -> int:
        """Return the entries of a table, padded as on chip."""
        return 1 << (of.view.table - 1).bit_length()

    def shape(self, of: ParameterSum) -> str:
        """Return the host's shape of the memory that kernels of "lift" add a sum to."""
        axes = {
            "head": ("all_heads", "n_blocks"),
            "key": ("all_heads", self.keys),
            "row": ("slots", "n_blocks", self.rows),
            "pair": ("all_heads", self.keys, self.keys),
            "table": ("all_heads", "n_blocks", str(of.view.table)),
        }
        return f"({', '.join(axes[of.kind])})"

    def gradient(self, view: View) -> str:
        """Return the host's expression for the gradient of a parameter."""
        sums = " + ".join(self._of_heads(of) for of in self.stage.sums if of.view == view)
        entries = view.has_entries and not (self.packed and view.token_axes)
        tables = [axis for axis in view.parameter.axes if isinstance(axis, int)]
        table = f".unflatten(-1, {tuple(tables)})" if len(tables) > 1 else ""
        return f"_of_parameter({sums}, batch, {entries}, {view.has_heads}){table}"

    def _of_heads(self, of: ParameterSum) -> str:
        """Return the sums of each head of each batch entry."""
        if of.kind in ("head", "table"):
            return f"{of.name}.sum(1)"
        if of.kind != "row":
            return of.name
        if self.packed:
            return f"_at_tokens({of.name}_of_rows, cu_seq_q, cu_seq_k, total_k)"
        return f"_at_positions({of.name}_of_rows, n_k)"
