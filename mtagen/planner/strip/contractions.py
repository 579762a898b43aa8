"""CUDA kernels of the lowering "strip" that multiply planes by rows of a tensor, on the tensor cores of sm_90a.

Results are outputs and the gradients of queries, keys and values. A CTA owns a block of results. It loops over the keys
of the plane, or over its rows and the heads that share keys, and leaves out tiles that are hidden. Memory bounds these
products, so copies must stay in flight.

Strips of a sequence share keys, and with a convolution also rows. A kernel adds their sums in fp32, and stores a result
that no later strip adds to in the dtype of the tensor.

Rows have 64 or 128 columns. A tile of 128 columns is as large as two of 64, so there a block has twice as many results:
otherwise kernels would read more rows than numbers of the plane. Other head dims stay with cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...spec import Spec
from ..cuda.memory import PANEL, SharedMap, swizzled_bytes
from ..cuda.wgmma import Wgmma
from ..kernel import Kernel, numbers, reads, strides, writes
from ..sizes import B0, B1, COUNT, KEYS, KV_HEADS, SLOTS
from ..targets import get_target
from .hidden import ALL, HiddenKeys
from .on_chip import BARRIER
from .source import StripSource

STEP = PANEL  # rows or keys that a CTA sums at once
TILES = 4  # in shared memory, each with a producer warp
# By the number of columns: results of a CTA, and resident CTAs per multiprocessor. While one of two CTAs adds the sums
# of earlier strips to its results, the other one copies.
BLOCKS: Mapping[int, tuple[int, int]] = {PANEL: (128, 2), 2 * PANEL: (256, 1)}
_WARP_ROWS = 16  # results of a warp
ROLES: Mapping[str, tuple[str, ...]] = {
    "forward": ("outputs",),
    "backward": ("grad_values", "grad_queries", "grad_keys"),
    "decode": (),
}


def contractions(pass_name: str, spec: Spec, target: str) -> tuple[ContractionKernel, ...]:
    """Return the kernels of a pass that fit. For other products of a batch, the host calls cuBLAS."""
    kernels = (ContractionKernel(spec, target, role) for role in ROLES[pass_name])
    return tuple(kernel for kernel in kernels if kernel.fits)


@dataclass(frozen=True)
class ContractionKernel(StripSource):
    """The kernel of a product of a plane with rows of a tensor.

    Attributes:
        spec: the request.
        target: name of the target.
        result: one of ``ROLES``.
    """

    spec: Spec
    target: str
    result: str

    template = "plane_contraction.cu.j2"

    @property
    def role(self) -> str:
        return self.result

    @property
    def over_rows(self) -> bool:
        """Whether the sum is over rows, and results belong to keys."""
        return self.role in ("grad_values", "grad_keys")

    @property
    def width(self) -> int:
        """Number of elements of a row of the tensor."""
        return self.spec.head_dim

    @property
    def skips(self) -> bool:
        """Whether rows before ``skip`` have no part in the product."""
        return self.role in ("outputs", "grad_values") and self.spec.context > 0

    @property
    def reach(self) -> int:
        """Number of next rows: the plane has a row's gradients for keys that the row or one of these rows sees."""
        return self.stages.reach if self.role in ("grad_queries", "grad_keys") else 0

    @property
    def sums(self) -> bool:
        """Whether several strips may add to a result."""
        return self.over_rows or (self.role == "grad_queries" and self.spec.context > 0)

    @property
    def fits(self) -> bool:
        is_supported = "wgmma" in get_target(self.target).matrix and not self.spec.packed
        return is_supported and self.spec.head_dim == self.spec.value_head_dim and self.width in BLOCKS

    @property
    def reads_hidden(self) -> HiddenKeys:
        # Tiles with keys that only rows after the tile see are read, too.
        return ALL if self.reach else HiddenKeys(max(self.block, STEP))

    # ---- The division of the work

    @property
    def block(self) -> int:
        """Number of results of a CTA."""
        return BLOCKS[self.width][0]

    @property
    def step(self) -> int:
        """Number of keys, or of rows, of a tile."""
        return STEP

    @property
    def warps(self) -> int:
        """Number of multiplying warps of a CTA."""
        return self.block // _WARP_ROWS

    @property
    def tiles(self) -> int:
        """Number of tiles in shared memory, each of which has a producer warp."""
        return TILES

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * (self.warps + TILES)

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return BLOCKS[self.width][1]

    @property
    def tile(self) -> int:
        """Bytes of a tile of the plane with the rows by which it is multiplied."""
        return swizzled_bytes(self.block, STEP) + swizzled_bytes(STEP, self.width)

    @property
    def wgmmas(self) -> tuple[Wgmma, ...]:
        """The products of warpgroups."""
        return (Wgmma("wgmma_product", self.width, self.spec.dtype, a_transposed=self.over_rows, b_transposed=True),)

    @cached_property
    def shared(self) -> SharedMap:
        """The map of the CTA's shared memory."""
        return SharedMap.of((("TILES", TILES * self.tile, 1024), ("BARRIERS", 2 * BARRIER * TILES, BARRIER)))

    @property
    def kernel(self) -> Kernel:
        of_sums = numbers("int", "places", "summed", "complete") if self.sums else ()
        origin = numbers("int", "key0") if self.over_rows else ()
        arguments = (
            *reads("Element", "plane", "y"),
            *writes("Element", "out"),
            *(writes("float", "sums", optional=True) if self.sums else ()),
            *strides("y", "out"),
            *self.sequence.arguments("n_heads", "group", "b0", skips=self.skips),
            *origin,
            *of_sums,
            *numbers("float", "factor"),
        )
        grid = ceiling(KEYS / self.block) * KV_HEADS * (B1 - B0) if self.over_rows else ceiling(COUNT / self.block) * SLOTS
        registers = self.gpu.registers_of(self.ctas * self.threads // 32)
        return Kernel(self.role, self.name, arguments, (grid,), self.threads, self.shared.size, registers)

    @property
    def legend(self) -> Iterator[str]:
        if self.over_rows:
            rows = "rows from `skip` on" if self.skips else "rows"
            yield f"out[b, h, key0 + j] = factor * the sum, over {rows} and the heads of group h, of"
            yield "plane[slot, r, j] y[b, head, first + r],"
        else:
            rows = ", for rows from `skip` on" if self.skips else ""
            yield "out[b, h, first + r] = factor * the sum over keys of"
            yield f"plane[slot, r, j] y[b, h / group, j]{rows},"
        yield "where a slot is a head of a sequence. Elements of the plane that are hidden from a row are zeros, in"
        yield "tiles of which some row sees a key. Other tiles are not read."
        if self.reach:
            yield "Here, a row sees what the next REACH rows see."
        if self.sums:
            yield "Rows of out from `summed` on begin with sums of strips before. Rows before `complete` are stored as"
            yield "sums, to which a later strip adds: (sequences, heads of out, places, columns) fp32."

    @property
    def summary(self) -> str:
        return f"CUDA, blocks of {self.block} results, tiles of {STEP}, {self.warps + TILES} warps"
