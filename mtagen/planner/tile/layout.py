"""The layout of the sequences of a training pass: entries of a batch, or packed documents in one
entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, ceiling, floor

from ...spec import Spec
from ..cache import Cache
from ..geometry.affine import N_K, N_Q, Size
from ..geometry.score import ScoreStage
from ..kernel import Argument, numbers, reads, strides
from ..sizes import BATCH, DOCUMENTS, HEADS, TOTAL_K, TOTAL_Q
from ..targets import GRID_YZ

# Names of structs: the batch entry, and a document's first query and key.
_ENTRY, _DOCUMENT_QUERY, _DOCUMENT_KEY = sympy.symbols("b q0 k0", integer=True, nonnegative=True)
LAYERS = sympy.Symbol("layers", integer=True, positive=True)  # layers of blocks along z of a grid


@dataclass(frozen=True)
class Layout:
    """Shapes, grids and arguments that depend on whether q, k and v are batches or packed documents.

    Attributes:
        packed: whether q, k and v are packed documents, (N, H, D); otherwise they are batches, (B,
            H, N, D).
        page_size: with packed documents, the tokens of a page of k and v, (pages, H, page_size, D);
            None if k and v are packed like q.
    """

    packed: bool
    page_size: int | None = None

    @classmethod
    def of(cls, spec: Spec) -> Layout:
        """Return the layout of a request."""
        return cls(spec.packed, spec.page_size)

    @property
    def sequence(self) -> str:
        """The struct that says where the rows of a CTA's sequence lie (``templates/cuda/batch.cuh``,
        ``packed.cuh``, ``paged.cuh``).
        """
        if self.page_size:
            return "Paged"
        return "Packed" if self.packed else "Batch"

    @property
    def batch(self) -> Expr:
        """Number of entries of the batch; all documents are in one entry."""
        return Integer(1) if self.packed else BATCH

    @property
    def queries(self) -> Expr:
        """Number of queries of an entry."""
        return TOTAL_Q if self.packed else N_Q

    @property
    def keys(self) -> Expr:
        """Number of keys of an entry."""
        return TOTAL_K if self.packed else N_K

    def blocks(self, rows: Expr, block: int) -> Expr:
        """Return the number of blocks of ``block`` rows in an entry.

        For packed documents return an upper limit, as the host's ``_schedule`` does.
        """
        return floor(rows / block) + DOCUMENTS if self.packed else ceiling(rows / block)

    def layers(self, blocks: Expr) -> Expr:
        """Return the number of layers along z into which blocks along y are divided, to fit a grid."""
        return ceiling(blocks / GRID_YZ)

    def with_room(self, rows: Expr, room: int) -> Expr:
        """Return the rows of an entry in which every sequence has ``room`` more rows after its
        last.
        """
        return rows + DOCUMENTS * room if self.packed else rows + room

    def outputs(self, width: int) -> tuple[Size, ...]:
        """Return the shape of a tensor with a vector of ``width`` elements for every query and
        head.
        """
        return (TOTAL_Q, HEADS, width) if self.packed else (BATCH, HEADS, N_Q, width)

    @property
    def statistics(self) -> tuple[Size, ...]:
        """Shape of a tensor with a number for every head and query."""
        return (HEADS, TOTAL_Q) if self.packed else (BATCH, HEADS, N_Q)

    def legend(self, rows: int, vectors: str) -> Iterator[str]:
        """Yield the lines of a source's comment that explain arguments for packed documents."""
        if self.packed:
            yield "Documents lie one after the other; cu_seq_q and cu_seq_k say where each begins, and the last ends."
            yield "A row of `tiles` holds a CTA's document, -1 if there is none, and the index of its block of"
            yield f"{rows} {vectors} in that document."
        if self.page_size:
            yield f"Keys and values lie in pages of {self.page_size}; row b of block_table lists those of document b."

    def strides(self, *tensors: str) -> tuple[Argument, ...]:
        """Return the strides of tensors, in elements, without the last."""
        axes = {"k": "bhn", "v": "bhn"} if self.page_size else {}
        packed = "nh" if self.packed else "bhn"
        return tuple(stride for x in tensors for stride in strides(x, axes=axes.get(x, packed)))

    @property
    def documents(self) -> tuple[Argument, ...]:
        """The arguments for the boundaries of documents, the schedule of their blocks, and their pages."""
        if not self.packed:
            return ()
        pages = Cache(self.page_size).cuda_arguments(restrict=True)
        return (*reads("int", "tiles", "cu_seq_q", "cu_seq_k"), *pages)

    @property
    def lengths(self) -> tuple[Argument, ...]:
        """Lengths that all sequences share."""
        return () if self.packed else numbers("int", "n_q", "n_k")

    def tokens(self, spec: Spec) -> tuple[str, ...]:
        """Return the name of the kernel argument for the number of tokens of parameters, if it needs one."""
        return (TOTAL_K.name,) if self.packed and ScoreStage.of(spec).views else ()

    @property
    def places(self) -> tuple[Argument, ...]:
        """The arguments that say where sequences lie, as the struct takes them."""
        return self.documents or self.lengths

    @property
    def first_query(self) -> Expr:
        """First query of a sequence among those of the batch or of all documents, in the struct's names."""
        return _DOCUMENT_QUERY if self.packed else _ENTRY * N_Q

    @property
    def first_key(self) -> Expr:
        """The same of keys."""
        return _DOCUMENT_KEY if self.packed else _ENTRY * N_K

    @property
    def row_places(self) -> tuple[Argument, ...]:
        """The arguments that say where the rows of a head's statistics lie."""
        lengths = numbers("int", self.queries.name)
        return (*lengths, *reads("int", "cu_seq_q"), *numbers("int", "documents")) if self.packed else lengths

    @property
    def key_places(self) -> tuple[Argument, ...]:
        """The arguments that say where the keys of a head lie."""
        if self.packed:
            return (*reads("int", "tiles", "cu_seq_k"), *numbers("int", "kv_heads"))
        return numbers("int", "n_k")
