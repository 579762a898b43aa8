"""The contents of one Python module of the lowering "strip"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..lift.tiling import block_dim
from ..names import suffix
from ..tile.passes import TilePass
from . import kernels
from .contractions import ContractionKernel
from .gradient_sums import GradientSum, gradient_sums
from .limits import Limits
from .on_chip_gradients import GradScoresKernel
from .passes import StripPass
from .planes import PlaneGradient
from .sequence import by_descriptor
from .source import StripSource
from .stages import Stages


@dataclass(frozen=True)
class StripModule:
    """The kernels and host functions of some passes of one plan.

    Attributes:
        passes: one or more passes of one spec and target.
    """

    passes: tuple[StripPass, ...]

    @classmethod
    def of(cls, passes: Iterable[StripPass]) -> StripModule:
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
        return f"mta_strip_{suffix(self.spec, self.target)}"

    @cached_property
    def stages(self) -> Stages:
        """The stages that the kernels compute."""
        return Stages(self.spec)

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    def has(self, pass_name: str) -> bool:
        """Return whether the module computes a pass."""
        return any(plan.pass_name == pass_name for plan in self.passes)

    def fuses(self, pass_name: str) -> bool:
        """Whether fused kernels compute a pass, instead of strips."""
        return self.has(pass_name) and bool(self[pass_name].fused)

    def streams(self, pass_name: str) -> bool:
        """Whether strips compute a pass."""
        return self.has(pass_name) and not self[pass_name].fused

    @property
    def keeps_unmixed(self) -> bool:
        """Whether the forward pass keeps unmixed outputs for the backward pass."""
        return self.fuses("forward") and self.fuses("backward")

    @property
    def trains(self) -> bool:
        """Whether the module computes a pass of training by strips."""
        return self.streams("forward") or self.streams("backward")

    def contracts(self, pass_name: str) -> bool:
        """Return whether mtagen's kernels multiply the planes of a pass by rows, instead of cuBLAS's."""
        return any(isinstance(source, ContractionKernel) for source in self[pass_name].cuda.values())

    def contraction(self, role: str) -> ContractionKernel:
        """Return the kernel of mtagen that makes a product, among others."""
        kernels = (source for source in self.cuda.values() if isinstance(source, ContractionKernel))
        return next(kernel for kernel in kernels if role in kernel.roles)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Role prefixes of the kernels that training and decode share."""
        return (*([""] if self.streams("forward") else ()), *(["decode_"] if self.has("decode") else ()))

    @cached_property
    def cuda(self) -> Mapping[str, StripSource | TilePass]:
        """The CUDA kernels, by role."""
        return {role: source for plan in self.passes for role, source in plan.cuda.items()}

    @cached_property
    def _kernels(self) -> Mapping[str, Kernel]:
        return {kernel.role: kernel for plan in self.passes for kernel in plan.kernels}

    def kernel(self, role: str) -> Kernel:
        """Return the kernel of a role, which is the same in all passes that have it."""
        return self._kernels[role]

    def constants(self, role: str) -> Mapping[str, int]:
        """Return the constants of the kernel of a role."""
        return dict(self.kernel(role).constants)

    def in_triton(self, role: str) -> bool:
        """Return whether the module has a Triton kernel of a role."""
        return role in self._kernels and role not in self.cuda

    def __getitem__(self, pass_name: str) -> StripPass:
        """Return the plan of a pass."""
        return next(plan for plan in self.passes if plan.pass_name == pass_name)

    @property
    def sequence(self) -> str:
        """The template that says where rows and keys of training lie."""
        return "strip_packed.j2" if self.spec.packed else "strip_batch.j2"

    @property
    def host(self) -> str:
        """The template that says what host functions of training do with these rows."""
        if self.spec.packed:
            return "strip_paged_host.j2" if self.spec.page_size else "strip_packed_host.j2"
        return "strip_batch_host.j2"

    @property
    def limits(self) -> Limits:
        """The numbers by which the host divides rows into strips."""
        most = (source.most_rows for source in self.cuda.values() if isinstance(source, GradScoresKernel))
        return Limits.of(self.spec, *most)

    @property
    def mixes_on_chip(self) -> bool:
        """Whether the kernels of the backward pass mix heads on the chip."""
        return self.has("backward") and self["backward"].on_chip

    @property
    def reads_outputs(self) -> bool:
        """Whether a kernel of the backward pass reads outputs."""
        return any(isinstance(source, GradScoresKernel) and source.reads_outputs for source in self.cuda.values())

    @property
    def block_d(self) -> int:
        """Head dim, padded as on chip."""
        return block_dim(self.spec.head_dim)

    @property
    def block_dv(self) -> int:
        """Value head dim, padded as on chip."""
        return block_dim(self.spec.value_head_dim)

    @property
    def by_descriptor(self) -> bool:
        """Whether tensor descriptors load and store tiles."""
        return by_descriptor(self.spec, self.target)

    @property
    def gradient_chunk(self) -> int:
        """Keys per partial sum of the gradient of a convolution's weight."""
        sources = (source for source in self.cuda.values() if isinstance(source, PlaneGradient))
        return min((source.tile_keys for source in sources), default=kernels.GRADIENT_CHUNK)

    @property
    def gradient_sums(self) -> tuple[GradientSum, ...]:
        """The sums at the end of the backward pass."""
        return gradient_sums(self.stages, kernels.PROGRAMS) if self.streams("backward") else ()
