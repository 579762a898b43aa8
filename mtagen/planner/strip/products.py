"""The CUDA kernels of the lowering "strip" that fill planes: products of rows of two tensors, on the tensor cores.

A CTA has rows of the first tensor, as many keys as it walks over of the second, and collects results in shared memory,
so that it writes whole lines. Where the target has products of warpgroups, those make all but a decode step's few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...spec import Spec
from ..kernel import Kernel, numbers, reads, strides, writes
from ..targets import get_target
from ..tile.memory import SharedMap
from ..tile.toeplitz import CHUNK
from ..tile.wgmma import Wgmma
from .kernels import decode_rows
from .sizes import COUNT, KEYS, SLOTS
from .source import StripSource

WARPS = 8  # that multiply
TILES = 2  # of keys in shared memory
ROWS, ROW_WARPS, TILE_KEYS = 128, 4, 64  # a tile, and the warps that share its rows
WARPGROUP_KEYS = 128  # of a tile that warpgroups multiply
DECODE_KEYS = 128  # of a tile of a decode step, which has few rows
WALK = 512  # keys of a CTA
_PANEL = 64  # columns that are swizzled together
_HELD_WIDTH = 128  # rows of so many columns fit registers
ROLES = ("scores", "grad_shares", "decode_scores")


@dataclass(frozen=True)
class ProductKernel(StripSource):
    """A product of rows with rows.

    Attributes:
        spec: the request.
        target: name of the target.
        product: one of ``ROLES``.
    """

    spec: Spec
    target: str
    product: str

    @property
    def template(self) -> str:  # type: ignore[override]
        """The kernel's template."""
        return "plane_product_sm90.cu.j2" if self.hopper else "plane_product.cu.j2"

    @property
    def hopper(self) -> bool:
        """Whether warpgroups multiply (sm_90a)."""
        return "wgmma" in get_target(self.target).matrix and not self.decodes

    @property
    def role(self) -> str:
        return self.product

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.spec.value_head_dim if self.role == "grad_shares" else self.spec.head_dim

    @property
    def result(self) -> str:
        """Type of the elements of the plane."""
        return self.spec.dtype if self.role == "grad_shares" else "fp16"

    @property
    def skips(self) -> bool:
        """Whether results of rows before ``skip`` are zeros."""
        return self.role == "grad_shares" and self.spec.context > 0

    @property
    def zeroes(self) -> bool:
        """Whether hidden results are zeros: a convolution reads them. Nothing else looks at them."""
        return self.stages.masks_grad_shares if self.role == "grad_shares" else self.stages.convolution is not None

    @property
    def fits(self) -> bool:
        # Rows fall into whole steps of an mma, and no scores are asked for but those that rows see.
        whole = self.width % 16 == 0 and not self.mask.zeroes_terms
        if self.role == "grad_shares" and not self.zeroes and not self.hopper:
            return False  # cuBLAS is faster than mma instructions
        return whole and self.shared.size <= self.shared_of(1)

    # ---- How the work is shared

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return WARPS

    @property
    def row_warps(self) -> int:
        """Warps that share the rows."""
        return 1 if self.decodes else ROW_WARPS

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return decode_rows(self.spec) if self.decodes else ROWS

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return DECODE_KEYS if self.decodes else WARPGROUP_KEYS if self.hopper else TILE_KEYS

    @property
    def walk(self) -> int:
        """Keys of a CTA."""
        return WALK

    @property
    def wgmmas(self) -> tuple[Wgmma, ...]:
        """The products of warpgroups."""
        return (Wgmma("wgmma_product", self.keys, self.spec.dtype),) if self.hopper else ()

    @property
    def holds_x(self) -> bool:
        """Whether a warp's rows stay in registers."""
        return self.width <= _HELD_WIDTH

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor."""
        return 2 if self.shared.size <= self.shared_of(2) else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA, on Hopper with those that load."""
        return 32 * (WARPS + (self.tiles if self.hopper else 0))

    @property
    def tiles(self) -> int:
        """Tiles of keys in shared memory, each of which one warp loads on Hopper."""
        return TILES

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return min(255, 65536 // (self.threads * self.ctas) // 8 * 8)

    # ---- Shared memory

    def _tile(self, rows: int) -> int:
        return -(-self.width // _PANEL) * _PANEL * 2 * rows

    @property
    def y_tile(self) -> int:
        """Bytes of a tile of keys."""
        return self._tile(self.keys)

    @property
    def result_row(self) -> int:
        """Bytes from a row of results to the next."""
        return 2 * (self.keys + CHUNK)

    @cached_property
    def shared(self) -> SharedMap:
        """The CTA's shared memory."""
        results = self.rows * (2 * _PANEL if self.hopper else self.result_row)
        tiles = TILES * self.y_tile
        regions = (("X", self._tile(self.rows), 1024), ("Y", tiles, 1024), ("RESULTS", results, 1024))
        return SharedMap.of((*regions, ("BARRIERS", 2 * 8 * TILES * self.hopper, 8)))

    @property
    def kernel(self) -> Kernel:
        arguments = (
            *reads("Element", "x", "y"),
            *writes("Result", "plane"),
            *(reads("int", "seqlens") if self.decodes else ()),
            *strides("x", "y"),
            *numbers("int", "count", "keys", "off", "first", "skip", "pitch", "n_heads", "group", "b0"),
            *numbers("float", "factor"),
        )
        grid = (ceiling(COUNT / self.rows) * ceiling(KEYS / self.walk) * SLOTS,)
        return Kernel(self.role, self.name, arguments, grid, self.threads, self.shared.size, self.registers)

    @property
    def legend(self) -> Iterator[str]:
        skipped = "; so are those of rows before `skip`" if self.skips else ""
        yield "Products of rows, a slot for each sequence and head: plane[slot, r, j] = factor * x[first + r] . y[j],"
        yield f"for query first + r, which sits at position first + r + off; hidden results are zeros{skipped}."
        if self.decodes:
            yield "Each sequence has a length of its own, and its last row is at its end."

    @property
    def summary(self) -> str:
        return f"CUDA, tiles of {self.rows} rows and {self.keys} keys, {self.threads // 32} warps"
