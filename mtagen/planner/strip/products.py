"""CUDA kernels of the lowering "strip" that fill planes with products of rows of two tensors, on
the tensor cores.

A CTA has a block of rows of the first tensor and loops over a range of keys of the second. It
collects results in shared memory, so that it writes whole lines. If the target has products of
warpgroups, they are used for all products except those of a decode step, which has few rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sympy import ceiling

from ...spec import Spec
from ..cache import Cache
from ..cuda.memory import PANEL, SharedMap, swizzled_bytes
from ..cuda.toeplitz import CHUNK
from ..cuda.wgmma import Wgmma
from ..kernel import Kernel, numbers, reads, strides, writes
from ..sizes import COUNT, KEYS, SLOTS
from ..targets import get_target
from .cost import DRAIN, START, Work
from .kernels import decode_rows
from .sequence import step_numbers
from .source import DECODE, Form, StripSource

WARPS = 8  # multiplying warps
TILES = 2  # tiles of keys in shared memory
ROWS, ROW_WARPS = 128, 4  # rows of a tile, and number of warps among which they are divided
_WALKS = (512, 256, 1024)
_FORMS = tuple(Form(keys=64, walk=walk) for walk in _WALKS)
_WARPGROUP_FORMS = tuple(Form(keys=128, walk=walk) for walk in _WALKS)
_DECODE_FORMS = (Form(keys=128, walk=512),)  # a decode step has few rows
_HELD_WIDTH = 128  # rows of up to this many columns fit registers
_SCORES, _GRAD_SHARES = "scores", "grad_shares"
ROLES = (_SCORES, _GRAD_SHARES, f"{DECODE}{_SCORES}")


def product_kernel(spec: Spec, target: str, role: str) -> ProductKernel:
    """Return the kernel of one of ``ROLES``."""
    warpgroups = "wgmma" in get_target(target).matrix and not role.startswith(DECODE)
    return (WarpgroupProduct if warpgroups else MmaProduct)(spec, target, role)


@dataclass(frozen=True)
class ProductKernel(StripSource):
    """The kernel of a product of rows with rows.

    Attributes:
        spec: the request.
        target: name of the target.
        product: one of ``ROLES``.
    """

    spec: Spec
    target: str
    product: str

    reads_cache = True

    @property
    def role(self) -> str:
        return self.product

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return self.spec.value_head_dim if self.role == _GRAD_SHARES else self.spec.head_dim

    @property
    def result(self) -> str:
        """Element type of the plane."""
        return self.spec.dtype if self.role == _GRAD_SHARES else "fp16"

    @property
    def skips(self) -> bool:
        """Whether results of rows before ``skip`` are zeros."""
        return self.role == _GRAD_SHARES and self.spec.context > 0

    @property
    def zeroes(self) -> bool:
        """Whether hidden results are set to zeros, because a convolution reads them."""
        return (
            self.stages.masks_probability_gradients
            if self.role == _GRAD_SHARES
            else self.stages.convolution is not None
        )

    @property
    def fits(self) -> bool:
        # Rows must be whole steps of an mma, and no hidden scores may be needed.
        whole = self.width % 16 == 0 and not self.mask.zeroes_terms
        return whole and self.shared.size <= self.gpu.shared_of(1)

    # ---- The decision

    @property
    def depends(self) -> str:
        return f"d{self.width}{' zeroes' if self.zeroes else ''}"

    @property
    @abstractmethod
    def flop_per_cycle(self) -> float:
        """Flop per cycle of the products on one multiprocessor."""

    @property
    @abstractmethod
    def gap(self) -> int:
        """Cycles in which a CTA has no loads in flight."""

    @property
    def cost(self) -> float:
        work = Work(
            traffic=2,
            moved=1,
            tensor=2 * self.width / self.flop_per_cycle,
            warps=self.warps,
            ctas=self.ctas,
            scores=self.rows * self.cta_keys,
            gap=self.gap,
        )
        return work.cycles(self.gpu)

    # ---- The division of the work

    @property
    def warps(self) -> int:
        """Number of multiplying warps of a CTA."""
        return WARPS

    @property
    def rows(self) -> int:
        """Number of rows of a CTA."""
        return ROWS

    @property
    def keys(self) -> int:
        """Number of keys of a tile."""
        return self.form.keys

    @property
    @abstractmethod
    def threads(self) -> int:
        """Number of threads of a CTA."""

    @property
    def cta_keys(self) -> int:
        """Number of keys of a CTA."""
        return self.form.walk

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return 2 if self.shared.size <= self.gpu.shared_of(2) else 1

    # ---- Shared memory

    @property
    def y_tile(self) -> int:
        """Bytes of a tile of keys."""
        return swizzled_bytes(self.keys, self.width)

    @property
    @abstractmethod
    def shared(self) -> SharedMap:
        """The map of the CTA's shared memory."""

    def _shared(self, *others: tuple[str, int, int]) -> SharedMap:
        operands = (("X", swizzled_bytes(self.rows, self.width), 1024), ("Y", TILES * self.y_tile, 1024))
        return SharedMap.of((*operands, *others))

    @property
    def kernel(self) -> Kernel:
        arguments = (
            *reads("Element", "x", "y"),
            *writes("Result", "plane"),
            *((*reads("int", "seqlens"), *step_numbers(self.spec, "int")) if self.decodes else ()),
            *Cache.of(self.spec).cuda_arguments(),
            *strides("x", "y"),
            *self.sequence.arguments("n_heads", "group", "b0"),
            *numbers("float", "factor"),
            *self.dropout,
        )
        grid = (ceiling(COUNT / self.rows) * ceiling(KEYS / self.cta_keys) * SLOTS,)
        registers = self.gpu.registers_of(self.threads // 32 * self.ctas)
        return Kernel(self.role, self.name, arguments, grid, self.threads, self.shared.size, registers)

    @property
    def legend(self) -> Iterator[str]:
        zeros = [*self.cleared[0].zeros] * self.zeroes + ["visible results of rows before `skip`"] * self.skips
        yield "Products of rows, a slot for each sequence and head: plane[slot, r, j] = factor * x[first + r] . y[j],"
        zeroed = f"; {' and '.join(zeros)} are zeros" if zeros else ""
        yield f"for query first + r, which sits at position first + r + off{zeroed}."
        if self.drops:
            yield "Results that dropout drops are zeros, too."
        if self.decodes:
            yield "Each sequence has a length of its own, and its last row is at its end."

    @property
    def summary(self) -> str:
        return f"CUDA, tiles of {self.rows} rows and {self.keys} keys, {self.threads // 32} warps"


class MmaProduct(ProductKernel):
    """The product by mma instructions. All warps load tiles and multiply."""

    template = "plane_product.cu.j2"

    @property
    def fits(self) -> bool:
        # If no results need to be zeros, cuBLAS computes the gradient of probabilities, faster than mma instructions.
        return super().fits and (self.role != _GRAD_SHARES or self.stages.has_gradient_product)

    @property
    def row_warps(self) -> int:
        """Number of warps among which the rows are divided."""
        return 1 if self.decodes else ROW_WARPS

    @property
    def rows(self) -> int:
        return decode_rows(self.spec) if self.decodes else ROWS

    @property
    def forms(self) -> Sequence[Form]:
        return _DECODE_FORMS if self.decodes else _FORMS

    @property
    def flop_per_cycle(self) -> float:
        return self.gpu.mma_flop_per_cycle

    @property
    def gap(self) -> int:
        return START + DRAIN * self.cta_keys // self.keys

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def holds_x(self) -> bool:
        """Whether a warp's rows stay in registers."""
        return self.width <= _HELD_WIDTH

    @property
    def result_row(self) -> int:
        """Bytes of a row of results."""
        return 2 * (self.keys + CHUNK)

    @cached_property
    def shared(self) -> SharedMap:
        return self._shared(("RESULTS", self.rows * self.result_row, 16))


class WarpgroupProduct(ProductKernel):
    """The product by warpgroups (sm_90a). Each tile in shared memory has a producer warp."""

    template = "plane_product_sm90.cu.j2"

    @property
    def forms(self) -> Sequence[Form]:
        return _WARPGROUP_FORMS

    @property
    def flop_per_cycle(self) -> float:
        return self.gpu.tensor_flop_per_cycle

    @property
    def gap(self) -> int:
        return START

    @property
    def threads(self) -> int:
        return 32 * (WARPS + TILES)

    @property
    def tiles(self) -> int:
        """Number of tiles of keys in shared memory."""
        return TILES

    @property
    def wgmmas(self) -> tuple[Wgmma, ...]:
        """The products of warpgroups."""
        return (Wgmma("wgmma_product", self.keys, self.spec.dtype),)

    @cached_property
    def shared(self) -> SharedMap:
        return self._shared(("RESULTS", swizzled_bytes(self.rows, PANEL), 1024), ("BARRIERS", 2 * 8 * TILES, 8))
