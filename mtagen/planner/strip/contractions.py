"""CUDA kernels of the lowering "strip" that multiply planes by rows of a tensor, on the tensor cores of sm_90a.

Results are outputs and the gradients of queries, keys and values. A CTA owns a block of results. It loops over the keys
of the plane, or over its rows and the heads that share keys, and leaves out tiles that are hidden. Memory bounds these
products, so copies must stay in flight.

One launch makes all results whose planes exist at the same time, so that the last CTAs of a product do not leave
multiprocessors idle. If few heads of keys have few CTAs, several CTAs divide the heads of queries that share a key. The
host adds their sums.

Strips of a sequence share keys, and with a convolution also rows. A kernel adds their sums in fp32, and stores a result
that no later strip adds to in the dtype of the tensor.

Rows have 64 or 128 columns. A tile of 128 columns is as large as two of 64. So its block has twice as many results, and
kernels read half as many bytes of rows as of the plane in both cases. cuBLAS makes the products of other head dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling, floor

from ...spec import Spec
from ..cuda.memory import PANEL, SharedMap, swizzled_bytes
from ..cuda.wgmma import Wgmma
from ..geometry.affine import Size
from ..kernel import Kernel, numbers, reads, strides, writes
from ..sizes import B0, B1, COUNT, GROUP, HEAD_PARTS, KEYS, KV_HEADS, TOGETHER
from ..targets import GRID_YZ, get_target
from .cost import streamed
from .hidden import ALL, HiddenKeys
from .on_chip import BARRIER
from .source import StripSource
from .stages import Stages

STEP = PANEL  # rows or keys that a CTA sums at once
TILES = 4  # in shared memory, each with a producer warp
# By the number of columns: results of a CTA, and resident CTAs per multiprocessor. While one of two CTAs adds the sums
# of earlier strips to its results, the other one copies.
BLOCKS: Mapping[int, tuple[int, int]] = {PANEL: (128, 2), 2 * PANEL: (256, 1)}
_WARP_ROWS = 16  # results of a warp
# L2 keeps the planes of heads that share keys between two products that read them, if the planes have at most this many
# elements: 24 MiB of 50 on an H200, as measured (benchmarks/notes/strips.md).
KEPT = 3 * 2**22
SHORT = 2**13  # rows over which a CTA sums in about as much time as over the keys of a long sequence
# Products of each pass, in the order of their CTAs in a launch.
ROLES: Mapping[str, tuple[str, ...]] = {
    "forward": ("outputs",),
    "backward": ("grad_queries", "grad_keys", "grad_values"),
    "decode": (),
}
# The tensors of each product: the plane, the rows by which it is multiplied, and the result.
_TENSORS: Mapping[str, tuple[str, str, str]] = {
    "outputs": ("shares", "v", "out"),
    "grad_queries": ("ds", "k", "dq"),
    "grad_keys": ("ds", "q", "dk"),
    "grad_values": ("shares", "grad_out", "dv"),
}
_KERNELS: Mapping[tuple[str, ...], str] = {  # roles of kernels of several products
    ("grad_queries", "grad_keys"): "grad_queries_and_keys",
    ("grad_queries", "grad_keys", "grad_values"): "grad_inputs",
}


def contractions(pass_name: str, spec: Spec, target: str) -> tuple[ContractionKernel, ...]:
    """Return the kernels of a pass that fit. For other products of a batch, the host calls cuBLAS."""
    roles = ROLES[pass_name]
    # After this product, the plane of shares takes the gradients of probabilities.
    apart = ("grad_values",) if pass_name == "backward" and Stages(spec).post_convolution else ()
    groups = (apart, tuple(role for role in roles if role not in apart))
    kernels = (ContractionKernel(spec, target, group) for group in groups if group)
    return tuple(kernel for kernel in kernels if kernel.fits)


@dataclass(frozen=True)
class Contraction:
    """A product of a plane with rows of a tensor.

    Attributes:
        spec: the request.
        role: one of ``ROLES``.
    """

    spec: Spec
    role: str

    @property
    def plane(self) -> str:
        """Name of the plane."""
        return _TENSORS[self.role][0]

    @property
    def y(self) -> str:
        """Name of the tensor."""
        return _TENSORS[self.role][1]

    @property
    def out(self) -> str:
        """Name of the result."""
        return _TENSORS[self.role][2]

    @property
    def over_rows(self) -> bool:
        """Whether the sum is over rows, and results belong to keys."""
        return self.y in ("q", "grad_out")

    @property
    def scaled(self) -> bool:
        """Whether the factor of scores multiplies the results."""
        return self.plane == "ds"

    @property
    def skips(self) -> bool:
        """Whether rows before ``skip`` have no part in the product."""
        return self.plane == "shares" and self.spec.context > 0

    @property
    def reach(self) -> int:
        """Number of next rows: the plane has a row's gradients for keys that the row or one of these rows sees."""
        return Stages(self.spec).reach if self.plane == "ds" else 0

    @property
    def sums(self) -> str:
        """Name of the sums, if several strips may add to a result; else empty."""
        several = self.over_rows or (self.role == "grad_queries" and self.spec.context > 0)
        return f"sum_{self.out[-1]}" if several else ""

    @property
    def places(self) -> tuple[str, str, str]:
        """Names of numbers about sums: the number of rows of the result, the first of them that strips before have
        summed, and the first that no later strip adds to.
        """
        axis = "k" if self.over_rows else "q"
        return f"n_{axis}", f"summed_{axis}", f"complete_{axis}"

    @property
    def block(self) -> int:
        """Number of results of a CTA."""
        return BLOCKS[self.spec.head_dim][0]

    @property
    def ctas_of_head(self) -> Size:
        """The number of CTAs of a head of keys."""
        return ceiling(KEYS / self.block) * HEAD_PARTS if self.over_rows else ceiling(COUNT / self.block) * GROUP

    @property
    def reads_hidden(self) -> HiddenKeys:
        """The hidden keys of the plane that the product reads."""
        # Tiles with keys that only rows after the tile see are read, too.
        return ALL if self.reach else HiddenKeys(max(self.block, STEP))

    @property
    def legend(self) -> Iterator[str]:
        """Lines that explain the product."""
        factor = "scale * " if self.scaled else ""
        if self.over_rows:
            rows = "rows from `skip` on" if self.skips else "rows"
            yield f"{self.out}[b, h, key0 + j] = {factor}the sum, over {rows} and the heads of group h, of"
            yield f"{self.plane}[slot, r, j] {self.y}[b, head, first + r]."
        else:
            rows = ", for rows from `skip` on" if self.skips else ""
            yield f"{self.out}[b, h, first + r] = {factor}the sum over keys of"
            yield f"{self.plane}[slot, r, j] {self.y}[b, h / group, j]{rows}."


@dataclass(frozen=True)
class ContractionKernel(StripSource):
    """The kernel of some products of planes with rows of tensors.

    Attributes:
        spec: the request.
        target: name of the target.
        roles: the products, in the order of their CTAs.
    """

    spec: Spec
    target: str
    roles: tuple[str, ...]

    template = "plane_contraction.cu.j2"

    @property
    def role(self) -> str:
        return _KERNELS.get(self.roles, self.roles[0])

    @cached_property
    def products(self) -> tuple[Contraction, ...]:
        """The products."""
        return tuple(Contraction(self.spec, role) for role in self.roles)

    @property
    def width(self) -> int:
        """Number of elements of a row of the tensors."""
        return self.spec.head_dim

    @property
    def fits(self) -> bool:
        is_supported = "wgmma" in get_target(self.target).matrix and not self.spec.packed
        return is_supported and self.spec.head_dim == self.spec.value_head_dim and self.width in BLOCKS

    @property
    def cost(self) -> float:
        return sum(streamed(role, self.spec.itemsize, self.gpu) for role in self.roles)

    # ---- The division of the work

    @property
    def grid(self) -> tuple[Size, ...]:
        """Heads of keys side by side, their CTAs, and sections of such heads."""
        heads, ctas = KV_HEADS * (B1 - B0), sum(product.ctas_of_head for product in self.products)
        return (TOGETHER, ctas, floor(heads / TOGETHER)) if self.sectioned else (heads, ctas)

    @property
    def kept(self) -> int:
        """The most elements of the planes of heads that share keys, if L2 keeps them."""
        return KEPT

    @property
    def most_sections(self) -> int:
        """Upper limit of the sections of a grid."""
        return GRID_YZ

    @property
    def short(self) -> int:
        """The most rows of heads that share a key, if one CTA sums over all of them."""
        return SHORT

    @property
    def enough_ctas(self) -> int:
        """The number of CTAs of a product that keeps half of the GPU busy, so that no heads are divided."""
        return self.gpu.multiprocessors * self.ctas // 2

    @property
    def sectioned(self) -> bool:
        """Whether several products read the same plane, and the host chooses how many heads run side by side."""
        return len(self.products) > 1

    @property
    def block(self) -> int:
        """Number of results of a CTA."""
        return self.products[0].block

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
        return tuple(
            Wgmma(name, self.width, self.spec.dtype, a_transposed=over_rows, b_transposed=True)
            for name, over_rows in (("wgmma_over_keys", False), ("wgmma_over_rows", True))
            if any(product.over_rows == over_rows for product in self.products)
        )

    @cached_property
    def shared(self) -> SharedMap:
        """The map of the CTA's shared memory."""
        return SharedMap.of((("TILES", TILES * self.tile, 1024), ("BARRIERS", 2 * BARRIER * TILES, BARRIER)))

    @property
    def kernel(self) -> Kernel:
        products = self.products
        results = [name for x in products for name in (x.y, x.out)]
        of_sums = [name for x in products if x.sums for name in x.places]
        of_keys = ["key0", "head_parts"] if any(x.over_rows for x in products) else []
        arguments = (
            *reads("Element", *dict.fromkeys([x.plane for x in products] + [x.y for x in products])),
            *writes("Element", *[x.out for x in products]),
            *writes("float", *[x.sums for x in products if x.sums], optional=True),
            *strides(*results),
            *self.sequence.arguments("n_heads", "group", "b0", skips=any(x.skips for x in products)),
            *numbers("int", *of_keys, *dict.fromkeys(of_sums)),
            *numbers("float", *(["scale"] if any(x.scaled for x in products) else [])),
        )
        registers = self.gpu.registers_of(self.ctas * self.threads // 32)
        return Kernel(self.role, self.name, arguments, self.grid, self.threads, self.shared.size, registers)

    @property
    def legend(self) -> Iterator[str]:
        for product in self.products:
            yield from product.legend
        yield "A slot is a head of a sequence. Elements of a plane that are hidden from a row are zeros, in tiles of"
        yield "which some row sees a key. Other tiles are not read."
        if any(product.over_rows for product in self.products):
            yield "The heads of a group are divided into `head_parts` parts, with a sum each."
        if any(product.reach for product in self.products):
            yield f"For ds, a row sees what the next {self.stages.reach} rows see."
        for axis, results in (("q", "queries"), ("k", "keys")):
            if any(product.sums and product.places[0] == f"n_{axis}" for product in self.products):
                yield f"Results of {results} from `summed_{axis}` on begin with sums of strips before. Results"
                heads = "heads of out * head_parts" if axis == "k" else "heads"
                yield f"before `complete_{axis}` are stored as sums, to which a later strip adds: (sequences, {heads},"
                yield f"n_{axis}, columns) fp32."

    @property
    def summary(self) -> str:
        return f"CUDA, blocks of {self.block} results, tiles of {STEP}, {self.warps + TILES} warps"
