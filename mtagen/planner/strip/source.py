"""What the CUDA kernels of the lowering "strip" have in common: each is a source file of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..names import kernel_name
from ..targets import get_target
from .stages import Stages

DECODE = "decode_"  # what roles of a decode step begin with
_RESERVED = 1024  # bytes of shared memory that each CTA takes besides its own


class StripSource(ABC):
    """One kernel. Implementations are frozen dataclasses.

    Attributes:
        spec: the request.
        target: name of the target.
        template: the template that prints the source.
    """

    spec: Spec
    target: str
    template: str

    @property
    @abstractmethod
    def role(self) -> str:
        """What the kernel does in its pass."""

    @property
    def decodes(self) -> bool:
        """Whether sequences have lengths of their own, at whose ends their rows are."""
        return self.role.startswith(DECODE)

    @property
    def name(self) -> str:
        """Name of the source file and of the kernel."""
        return kernel_name("strip", self.role, self.spec, self.target)

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether it can do what the request asks, on the target."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """Its arguments and how it is launched."""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the source."""
        return (self.kernel,)

    @property
    @abstractmethod
    def legend(self) -> Iterator[str]:
        """What it computes."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """In the plan's table."""

    @property
    def stages(self) -> Stages:
        """What the kernels of the pass are made for."""
        return Stages(self.spec)

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(self.spec)

    def shared_of(self, ctas: int) -> int:
        """Bytes of shared memory that each of so many CTAs of a multiprocessor may take."""
        return (get_target(self.target).shared_per_block + _RESERVED) // ctas - _RESERVED
