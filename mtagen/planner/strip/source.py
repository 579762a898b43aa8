"""What the CUDA kernels of the lowering "strip" have in common: each is a source file of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Argument, Kernel, numbers, reads
from ..names import kernel_name
from ..passes import Fields
from ..targets import get_target
from .cost import streamed
from .documents import RECORD, TILE, begin_multiple
from .kernels import dropout_numbers
from .stages import Stages

DECODE = "decode_"  # what roles of a decode step begin with
_RESERVED = 1024  # bytes of shared memory that each CTA takes besides its own


@dataclass(frozen=True)
class Form:
    """What request and target leave open of a kernel; 0 is what it does not choose.

    Attributes:
        warps: warps of a CTA.
        ctas: CTAs of a multiprocessor.
        keys: keys of a tile.
        walk: keys that a CTA walks along, in whole tiles.
    """

    warps: int = 0
    ctas: int = 0
    keys: int = 0
    walk: int = 0

    @property
    def fields(self) -> Fields:
        """What is chosen, JSON-ready."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class StripSource(ABC):
    """One kernel. Implementations are frozen dataclasses.

    Attributes:
        spec: the request.
        target: name of the target.
        form: one of ``forms``.
        template: the template that prints the source.
    """

    spec: Spec
    target: str
    form: Form = field(default=Form(), kw_only=True)
    template: ClassVar[str]

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

    # ---- What is decided of it

    @property
    def forms(self) -> Sequence[Form]:
        """What it may look like, on some target; one that is preferred to others of the same cost comes first."""
        return (Form(),)

    @property
    def variants(self) -> Sequence[StripSource]:
        """The kernel in each form that fits, the cheapest by the cost model first."""
        made = (replace(self, form=form) for form in self.forms)
        return sorted((one for one in made if one.fits), key=lambda one: one.cost)

    @property
    def depends(self) -> str:
        """What the best form depends on, besides the role and the type of elements."""
        return ""

    @property
    def key(self) -> str:
        """Key of the decision about its form."""
        return f"strip {self.role} {self.depends} {self.spec.dtype}"

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score."""
        return streamed(self.role, self.spec.itemsize, get_target(self.target))

    @property
    def stages(self) -> Stages:
        """What the kernels of the pass are made for."""
        return Stages(self.spec)

    @property
    def drops(self) -> bool:
        """Whether it drops."""
        return self.role in self.stages.dropping

    @property
    def dropout(self) -> tuple[Argument, ...]:
        """What it takes to draw what is kept, if it drops."""
        return (*reads("long long", "seed"), *numbers("int", *dropout_numbers(self.spec))) if self.drops else ()

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(self.spec)

    @property
    def tile(self) -> int:
        """Places of a tile: a document's begin with one."""
        return TILE

    @property
    def begin_multiple(self) -> int:
        """In a window, the first key of a document in a strip is a multiple of this."""
        return begin_multiple(self.spec)

    @property
    def record(self) -> tuple[str, ...]:
        """What kernels are told of each tile of places."""
        return RECORD

    def strip_arguments(self, *more: str, skips: bool = True) -> tuple[Argument, ...]:
        """Where the strip is, and other numbers.

        Args:
            more: names of these.
            skips: whether rows before ``skip`` differ from others. Of documents, rows that a strip does not need do.
        """
        if self.spec.packed:
            return (*reads("int", "documents"), *numbers("int", "count", "keys", "place0", "skip", "pitch", *more))
        skip = ("skip",) if skips else ()
        return numbers("int", "count", "keys", "off", "first", *skip, "pitch", *more)

    def registers_of(self, warps: int) -> int:
        """Registers that a thread may take where a multiprocessor holds so many warps."""
        return get_target(self.target).registers_per_multiprocessor // (32 * warps)

    def shared_of(self, ctas: int) -> int:
        """Bytes of shared memory that each of so many CTAs of a multiprocessor may take."""
        return (get_target(self.target).shared_per_block + _RESERVED) // ctas - _RESERVED
