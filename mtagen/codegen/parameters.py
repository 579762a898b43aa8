"""Texts about the parameters of the function of scores, and about their gradients, for kernels and hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.cuda.score import row_factor
from ..planner.geometry.score import ParameterSum, ScoreStage, View, learned_views, views_of
from ..spec import Spec

# Triton's functions that compute what the function of scores at each place needs of a head
_PARTS = {"scores": "_parts_of_scores", "convolved": "_parts_of_convolved", "logits": "_score_parts"}


def learned(spec: Spec) -> Sequence[str]:
    """Return the host's names of the factors, the sink and the parameters, in the order of calls."""
    return _learned(spec, views_of(spec))


def differentiated(spec: Spec) -> Sequence[str]:
    """Return the host's names of the learned tensors that have gradients, in the order of calls."""
    return _learned(spec, learned_views(spec))


def _learned(spec: Spec, views: Sequence[View]) -> Sequence[str]:
    return (*spec.ranks, *(["sink"] if spec.sink else []), *(view.argument for view in views))


def tables(spec: Spec, pass_name: str) -> str:
    """Return the parameters that the mask adds to host functions: its tables, and what kernels check pairs by."""
    return "".join(f", {argument.name}" for argument in (*spec.tables(pass_name), *spec.checked_arguments))


def parts_call(
    stage: ScoreStage, head: str, entry: str, first_key: str, tokens: str, all_tokens: str, n_heads: str
) -> str:
    """Return a Triton kernel's call that computes what the function of scores needs of a head.

    Args:
        stage: the function.
        head: the head of queries.
        entry: the batch entry or document.
        first_key: the first key of the sequence among the tokens of parameters.
        tokens: number of tokens of the sequence.
        all_tokens: number of tokens of a head of parameters.
        n_heads: number of heads of queries.
    """
    if not stage.views:
        return f"{_PARTS[stage.place]}({head})"
    places = ", ".join((entry, first_key, tokens, all_tokens, n_heads))
    addresses = ", ".join(f"{view.argument}_ptr" for view in stage.views)
    return f"{_PARTS[stage.place]}({head}, {places}, {addresses})"


@dataclass(frozen=True)
class Sums(ABC):
    """Texts about the sums for gradients of parameters.

    Attributes:
        each: the sums.
        packed: whether documents are packed.
        keys: the host's number of keys of a head.
    """

    each: tuple[ParameterSum, ...]
    packed: bool
    keys: str

    def memory(self, of: ParameterSum) -> str:
        """Return the host's name of a sum of rows or of pairs."""
        return of.name

    @abstractmethod
    def of_parts(self, of: ParameterSum) -> str:
        """Return the host's sums of each head of each batch entry, from those of parts of a head."""

    @property
    def of_rows(self) -> bool:
        """Whether there are sums of rows."""
        return any(of.kind == "row" for of in self.each)

    def block(self, of: ParameterSum) -> int:
        """Return the entries of a table, padded as on chip."""
        return 1 << (of.view.table - 1).bit_length()

    def gradient(self, view: View, *others: Sums) -> str:
        """Return the host's expression for the gradient of a parameter, whose sums may be among ``others``, too."""
        kernels = (self, *others)
        sums = " + ".join(kernel._of_heads(of) for kernel in kernels for of in kernel.each if of.view == view)
        entries = view.has_entries and not (self.packed and view.token_axes)
        tables = [axis for axis in view.parameter.axes if isinstance(axis, int)]
        table = f".unflatten(-1, {tuple(tables)})" if len(tables) > 1 else ""
        return f"_of_parameter({sums}, batch, {entries}, {view.has_heads}){table}"

    def _of_heads(self, of: ParameterSum) -> str:
        """Return the sums of each head of each batch entry."""
        if of.kind == "pair":
            return self.memory(of)
        if of.kind != "row":
            return self.of_parts(of)
        if self.packed:
            return f"_at_tokens({self.memory(of)}, cu_seq_q, cu_seq_k, {self.keys})"
        return f"_at_positions({self.memory(of)}, {self.keys})"


@dataclass(frozen=True)
class LiftSums(Sums):
    """Sums of "lift", whose programs own blocks of keys.

    Attributes:
        rows: the host's number of rows of a head.
        blocks: the host's number of programs that each have a part of a head's sum.
    """

    rows: str
    blocks: str = "n_blocks"

    def shape(self, of: ParameterSum) -> str:
        """Return the host's shape of the memory that kernels add a sum to."""
        axes = {
            "head": ("all_heads", self.blocks),
            "key": ("all_heads", self.keys),
            "row": ("slots", self.blocks, self.rows),
            "pair": ("all_heads", self.keys, self.keys),
            "table": ("all_heads", self.blocks, str(of.view.table)),
        }
        return f"({', '.join(axes[of.kind])})"

    def memory(self, of: ParameterSum) -> str:
        return f"{of.name}_of_rows" if of.kind == "row" else of.name

    def of_parts(self, of: ParameterSum) -> str:
        return of.name if of.kind == "key" else f"{of.name}.sum(1)"


class TileSums(Sums):
    """Sums of "tile", whose warps each have a part of a head's or of a key's."""

    def memory(self, of: ParameterSum) -> str:
        if of.kind != "row":
            return of.name
        factor = row_factor(of)
        return "of_positions" if factor == 1 else f"{float(factor)!r} * of_positions"

    def of_parts(self, of: ParameterSum) -> str:
        return f"{of.name}.sum(1)"


@dataclass(frozen=True)
class RowSums(Sums):
    """Sums of the kernels of rows of "strip", whose programs own rows of bundles of heads.

    Attributes:
        programs: programs of a bundle.
        heads: heads of a bundle.
        block_of_heads: the same, padded as on chip.
    """

    programs: int
    heads: int
    block_of_heads: int

    def shape(self, of: ParameterSum) -> str:
        """Return the host's shape of the memory that kernels add a sum to."""
        if of.kind == "row":
            return "lse.shape"
        if of.kind == "pair":
            return f"(batch * n_heads, {self.keys}, {self.keys})"
        more = {"key": (self.keys,), "table": (str(self.block(of)),)}.get(of.kind, ())
        bundles = f"batch * triton.cdiv(n_heads, {self.heads})"
        return f"({', '.join((bundles, str(self.programs), str(self.block_of_heads), *more))})"

    def memory(self, of: ParameterSum) -> str:
        flat = of.kind == "row" and not self.packed
        return f"{of.name}_partial.flatten(0, 1)" if flat else f"{of.name}_partial"

    def of_parts(self, of: ParameterSum) -> str:
        sums = f"_of_bundles({of.name}_partial, batch, n_heads, {self.heads})"
        return f"{sums}[:, :{of.view.table}]" if of.kind == "table" else sums


@dataclass(frozen=True)
class ProductSums(Sums):
    """Sums of the products of "strip", whose programs own a block of rows and a chunk of keys of a head."""

    def shape(self, of: ParameterSum) -> str:
        """Return the host's shape of the memory that kernels add a sum to."""
        axes = {
            "head": ("row_blocks", "key_chunks"),
            "key": ("row_blocks", self.keys),
            "row": ("key_chunks", "n_q"),
            "pair": (self.keys, self.keys),
            "table": ("row_blocks", "key_chunks", str(self.block(of))),
        }
        return f"(batch * n_heads, {', '.join(axes[of.kind])})"

    def memory(self, of: ParameterSum) -> str:
        return f"{of.name}_partial.sum(1)" if of.kind == "row" else f"{of.name}_partial"

    def of_parts(self, of: ParameterSum) -> str:
        sums = f"{of.name}_partial.sum({1 if of.kind == 'key' else (1, 2)})"
        return f"{sums}[:, :{of.view.table}]" if of.kind == "table" else sums
