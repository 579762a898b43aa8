"""The grids of training passes: which CTA has which tile of which head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy
from sympy import Expr, ceiling, floor

from ...spec import Spec
from ..geometry.affine import N_K, N_Q
from ..geometry.mask import Mask
from ..sizes import BATCH, HEADS, KV_HEADS, SPLITS
from .backward_geometry import ROW_TILE, BackwardGeometry
from .layout import LAYERS, Layout
from .sections import Sections

ROW_PITCH, KEY_BLOCKS, DQ_PIECES, DW_TERMS, DK_PIECES = sympy.symbols(
    "row_pitch key_blocks dq_pieces dw_terms dk_pieces", integer=True, positive=True
)


@dataclass(frozen=True)
class TileGrid:
    """A grid of CTAs, each for a tile of a head.

    Attributes:
        spec: the request.
        hopper: whether the kernel is one for sm_90a.
    """

    spec: Spec
    hopper: bool

    @cached_property
    def layout(self) -> Layout:
        """The layout of sequences."""
        return Layout.of(self.spec)

    @property
    @abstractmethod
    def tiles(self) -> Expr:
        """Number of tiles of a head."""

    @property
    def _takes_sections(self) -> bool:
        """Whether heads are cut into sections: only for batches on sm_90a, where it was measured."""
        return self.hopper and not self.layout.packed and not Mask.of(self.spec).hides_earlier

    @property
    @abstractmethod
    def sections(self) -> Sections | None:
        """The sections of heads whose CTAs share L2, if there are any."""

    @property
    def layers(self) -> Expr | None:
        """Number of layers along z of tiles, which lie along y; None if z has another use."""
        return None if self.sections else self.layout.layers(self.tiles)

    @property
    @abstractmethod
    def size(self) -> tuple[Expr, ...]:
        """The extents of the grid."""

    @property
    def has_spare_tiles(self) -> bool:
        """Whether layers may have more tiles than a head; a schedule of documents says which exist."""
        return False

    @property
    def reverses_tiles(self) -> bool:
        """Whether CTAs take the last tiles first."""
        return False

    @property
    def counts_heads(self) -> bool:
        """Whether CTAs need the number of heads in the grid."""
        return False

    @property
    def counts_tiles(self) -> bool:
        """Whether CTAs need the number of a head's tiles in the grid."""
        return self.reverses_tiles

    @property
    @abstractmethod
    def order(self) -> str:
        """The order in which CTAs take tiles of documents (``templates/host/documents.py``): long
        ones first.
        """


@dataclass(frozen=True)
class ForwardGrid(TileGrid):
    """The grid of the forward pass, whose tiles are blocks of rows.

    Attributes:
        owned: number of rows of a tile.
    """

    owned: int

    @property
    def tiles(self) -> Expr:
        return self.layout.blocks(self.layout.queries, self.owned)

    @property
    def sections(self) -> Sections | None:
        return Sections(BATCH * HEADS, 4, N_K, self.spec.head_dim, self.tiles) if self._takes_sections else None

    @property
    def size(self) -> tuple[Expr, ...]:
        if self.sections:
            return self.sections.grid
        return self.layout.batch * HEADS, ceiling(self.tiles / LAYERS), LAYERS

    @property
    def has_spare_tiles(self) -> bool:
        return self.layers is not None and not self.layout.packed

    @property
    def reverses_tiles(self) -> bool:
        """Whether CTAs take the last tiles first, which see the most keys.

        Schedules of documents have an order of their own.
        """
        return Mask.of(self.spec).favours_later_rows and not self.layout.packed

    @property
    def order(self) -> str:
        return "later" if Mask.of(self.spec).favours_later_rows else "longest"


@dataclass(frozen=True)
class SplitGrid(ForwardGrid):
    """The grid of the forward pass with splits of the keys along z.

    Only calls that do not fill the GPU are split. They need no sections, and have few tiles.
    """

    @property
    def sections(self) -> None:
        return None

    @property
    def layers(self) -> None:
        return None

    @property
    def size(self) -> tuple[Expr, ...]:
        return BATCH * HEADS, self.tiles, SPLITS


@dataclass(frozen=True)
class BackwardGrid(TileGrid):
    """The grids of the backward pass. Tiles of the main kernel are blocks of keys.

    The last kernel counts on the order of tiles.

    Attributes:
        geometry: the geometry of a CTA of the main kernel.
    """

    geometry: BackwardGeometry

    @property
    def tiles(self) -> Expr:
        return self.layout.blocks(self.layout.keys, self.geometry.owned)

    @property
    def sections(self) -> Sections | None:
        """The sections of heads whose CTAs share L2, if there are any.

        Sections are not used if gradients must be deterministic. Then each CTA waits for the one
        before it of its head, and with fewer heads side by side more CTAs would wait.
        """
        if not self._takes_sections:
            return None
        return Sections(BATCH * KV_HEADS, 2, N_Q, self.spec.head_dim, KEY_BLOCKS, "deterministic")

    @property
    def size(self) -> tuple[Expr, ...]:
        """The extents of the main kernel's grid."""
        if self.sections:
            return self.sections.grid
        return self.layout.batch * KV_HEADS, floor(KEY_BLOCKS / LAYERS), LAYERS

    @property
    def counts_heads(self) -> bool:
        """Whether CTAs need the number of heads: workspaces have a place for each CTA."""
        return True

    @property
    def counts_tiles(self) -> bool:
        """Whether CTAs need the number of tiles: workspaces have a place for each CTA."""
        return True

    @property
    def order(self) -> str:
        """The order in which CTAs take tiles of documents.

        Tiles of a document come in the order of its keys, because a CTA may wait for the one before
        it.
        """
        return "earlier" if Mask.of(self.spec).favours_later_rows else "longest"

    @property
    def rows_size(self) -> tuple[Expr, ...]:
        """The extents of the grid of the first kernel."""
        return (self.layout.batch * HEADS * ceiling(ROW_PITCH / (256 // self.geometry.statistics_lanes)),)

    @property
    def finish_size(self) -> tuple[Expr, ...]:
        """The extents of the grid of the last kernel."""
        pieces = ceiling(DQ_PIECES / 256) + (ceiling(DK_PIECES / 256) if self.geometry.halo else 0)
        return (ceiling(HEADS * (self.spec.cq * self.spec.ck) / 8) + pieces,)

    @property
    def row_room(self) -> int:
        """Rows of statistics past a sequence's last row, which a CTA may load: up to a step and a
        row tile more.
        """
        return ROW_TILE + 2 * self.geometry.rows

    @property
    def symbols(self) -> Mapping[str, Expr]:
        """Values of the symbols in grids, buffers and arguments.

        A head's statistics have ``row_pitch`` rows. The last kernel finishes the sums of dQ in
        ``dq_pieces`` of 16, and dK of columns that CTAs share in ``dk_pieces``.
        """
        layout, halo, pieces = self.layout, self.geometry.halo, self.spec.head_dim // 16
        return {
            "row_pitch": layout.with_room(layout.queries, self.row_room),
            "key_blocks": ceiling(self.tiles / LAYERS) * LAYERS if self.layers else self.tiles,
            "dq_pieces": layout.batch * HEADS * layout.queries * pieces,
            "dw_terms": layout.batch * KEY_BLOCKS,
            **({"dk_pieces": layout.batch * KV_HEADS * KEY_BLOCKS * 2 * halo * pieces} if halo else {}),
        }
