"""The contents of one Triton module: the passes of a plan that use the lowering "lift"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..names import suffix
from ..splits import SplitRule
from .decode import Decode
from .operands import Lift
from .passes import LiftPass
from .tiling import TENSOR_ROLES, Tile, block_dim


@dataclass(frozen=True)
class LiftModule:
    """The kernels and host functions of some passes of one plan.

    Attributes:
        passes: one or more passes of one spec and target.
    """

    passes: tuple[LiftPass, ...]

    @classmethod
    def of(cls, passes: Iterable[LiftPass]) -> LiftModule:
        """Make the module of some passes."""
        return cls(tuple(passes))

    @property
    def spec(self) -> Spec:
        """The request."""
        return self.passes[0].spec

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.passes[0].target

    @property
    def name(self) -> str:
        """Name of the module."""
        return f"mta_lift_{suffix(self.spec, self.target)}"

    @property
    def lift(self) -> Lift:
        """Geometry of the lowering."""
        return self.passes[0].lift

    @property
    def decode(self) -> Decode:
        """Geometry of decode."""
        return self.passes[0].decode

    @property
    def sequence(self) -> str:
        """How tensors hold sequences: ``Batch``, an entry for each; ``Packed``, one after the other; or
        ``Paged``, packed queries with keys in pages.
        """
        if self.spec.packed:
            return "Paged" if self.spec.page_size else "Packed"
        return "Batch"

    @property
    def mask(self) -> Mask:
        """The mask."""
        return self.lift.mask

    def has(self, pass_name: str) -> bool:
        """Return whether the module computes a pass."""
        return any(plan.pass_name == pass_name for plan in self.passes)

    def __getitem__(self, pass_name: str) -> LiftPass:
        """Return the plan of a pass."""
        return next(plan for plan in self.passes if plan.pass_name == pass_name)

    @cached_property
    def _tiles(self) -> dict[str, Tile]:
        return {role: tile for plan in self.passes for role, tile in plan.tiles}

    @cached_property
    def _kernels(self) -> dict[str, Kernel]:
        return {kernel.role: kernel for plan in self.passes for kernel in plan.kernels}

    def tile(self, role: str) -> Tile:
        """Return the tile of a kernel."""
        return self._tiles[role]

    def kernel(self, role: str) -> Kernel:
        """Return the kernel of a role, which is the same in all passes that have it."""
        return self._kernels[role]

    @property
    def block_d(self) -> int:
        """Head dim, padded as on chip."""
        return block_dim(self.spec.head_dim)

    @property
    def block_dv(self) -> int:
        """Value head dim, padded as on chip."""
        return block_dim(self.spec.value_head_dim)

    @property
    def vector(self) -> int:
        """Number of elements in 16 bytes. Rows must start at multiples of it."""
        return 16 // self.spec.itemsize

    @property
    def lifted_bytes(self) -> int:
        """Bytes of all terms of a lifted vector, and of their gradients, which are fp32."""
        return self.lift.terms * self.spec.head_dim * (self.spec.itemsize + 4)

    @property
    def strip_multiple(self) -> int:
        """Divisor of the rows of a chunk in the backward pass, so that no block crosses chunks."""
        return max(128, *(tile.block_m for role, tile in self["backward"].tiles if role in TENSOR_ROLES))

    def split_rule(self, role: str) -> SplitRule:
        """Return the rule for the number of splits of a decode kernel."""
        return self["decode"].split_rule(role)
