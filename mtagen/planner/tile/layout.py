"""Where the sequences of a training pass lie: entries of a batch, or packed documents, which share one entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, ceiling, floor

from ...spec import Spec
from ..geometry.affine import N_K, N_Q, Size
from ..kernel import BATCH, HEADS, TOTAL_Q, Argument, numbers, reads, strides
from ..targets import GRID_YZ

LAYERS = sympy.Symbol("layers", integer=True, positive=True)  # of tiles that lie along y and z of a grid
TOTAL_K, DOCUMENTS = sympy.symbols("total_k documents", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Layout:
    """Shapes, grids and arguments that depend on whether q, k and v are batches or packed documents.

    Attributes:
        packed: whether they are packed documents, (N, H, D), else batches, (B, H, N, D).
    """

    packed: bool

    @classmethod
    def of(cls, spec: Spec) -> Layout:
        """The layout of a request."""
        return cls(spec.packed)

    @property
    def batch(self) -> Expr:
        """Entries of the batch; all documents are in one."""
        return Integer(1) if self.packed else BATCH

    @property
    def queries(self) -> Expr:
        """Queries of an entry."""
        return TOTAL_Q if self.packed else N_Q

    @property
    def keys(self) -> Expr:
        """Keys of an entry."""
        return TOTAL_K if self.packed else N_K

    def blocks(self, rows: Expr, block: int) -> Expr:
        """Tiles of so many rows that CTAs of an entry take: of documents so many as ``_schedule`` of the host lists."""
        return floor(rows / block) + DOCUMENTS if self.packed else ceiling(rows / block)

    def layers(self, blocks: Expr) -> Expr:
        """Layers along z of a grid that has so many tiles along y, of which y alone may not hold all."""
        return ceiling(blocks / GRID_YZ)

    def with_room(self, rows: Expr, room: int) -> Expr:
        """Rows of an entry where every sequence has so many more rows after its last."""
        return rows + DOCUMENTS * room if self.packed else rows + room

    def outputs(self, width: int) -> tuple[Size, ...]:
        """Shape of a vector of so many elements for every query and head."""
        return (TOTAL_Q, HEADS, width) if self.packed else (BATCH, HEADS, N_Q, width)

    @property
    def statistics(self) -> tuple[Size, ...]:
        """Shape of a number for every head and query."""
        return (HEADS, TOTAL_Q) if self.packed else (BATCH, HEADS, N_Q)

    def legend(self, rows: int, vectors: str) -> Iterator[str]:
        """What arguments mean that tell a CTA its document, of which it owns so many rows of some vectors."""
        if self.packed:
            yield "Documents lie one after the other; cu_seq_q and cu_seq_k say where each begins, and the last ends."
            yield f"A row of tiles has a CTA's document, -1 if there is none, and the number of its {rows} {vectors}."

    def strides(self, *tensors: str) -> tuple[Argument, ...]:
        """The strides of tensors, in elements, less the last one."""
        return strides(*tensors, axes="nh" if self.packed else "bhn")

    @property
    def documents(self) -> tuple[Argument, ...]:
        """Pointers to where documents begin, and to the CTAs' tiles of them."""
        return reads("int", "tiles", "cu_seq_q", "cu_seq_k") if self.packed else ()

    @property
    def lengths(self) -> tuple[Argument, ...]:
        """Lengths that all sequences share."""
        return () if self.packed else numbers("int", "n_q", "n_k")
