"""The base class of the CUDA kernels of the lowering "strip", each of which has its own source
file.
"""

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
from ..targets import Target, get_target
from .cost import streamed
from .hidden import ALL, HiddenKeys
from .kernels import dropout_numbers
from .sequence import StripSequence
from .stages import Stages

DECODE = "decode_"  # prefix of the roles of a decode step


@dataclass(frozen=True)
class Form:
    """The decision about a kernel. A field is 0 if the kernel does not choose it.

    Attributes:
        warps: warps of a CTA.
        ctas: resident CTAs per multiprocessor.
        keys: keys of a tile.
        walk: keys of a CTA, in whole tiles.
    """

    warps: int = 0
    ctas: int = 0
    keys: int = 0
    walk: int = 0

    @property
    def fields(self) -> Fields:
        """The chosen fields, JSON-ready."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class StripSource(ABC):
    """The plan of one kernel and its source file. Implementations are frozen dataclasses.

    The base class holds names, the decision and the text, which :class:`StripPass` asks of every
    kernel alike. ``sequence``, and the ``slab``, ``shared`` or ``formula`` of an implementation, are
    values of their own.

    Attributes:
        spec: the request.
        target: name of the target.
        form: one of ``forms``.
        cleared: for each plane that the kernel writes, hidden keys that other kernels read.
        template: the template of the source.
        reads_cache: whether the kernel, of a decode step, reads keys or values.
    """

    spec: Spec
    target: str
    form: Form = field(default=Form(), kw_only=True)
    cleared: tuple[HiddenKeys, ...] = field(default=(ALL, ALL), kw_only=True)
    template: ClassVar[str]
    reads_cache: ClassVar[bool] = False

    @property
    @abstractmethod
    def role(self) -> str:
        """The kernel's role in its pass."""

    @property
    def decodes(self) -> bool:
        """Whether the kernel is one of a decode step, whose sequences have different lengths."""
        return self.role.startswith(DECODE)

    @property
    def name(self) -> str:
        """The name of the source file and of the kernel."""
        return kernel_name("strip", self.role, self.spec, self.target)

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether the kernel supports the request and fits the target."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """The kernel's arguments and launch."""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the source."""
        return (self.kernel,)

    @property
    @abstractmethod
    def legend(self) -> Iterator[str]:
        """Lines that explain the kernel: its formula."""

    @property
    def comment(self) -> Iterator[str]:
        """Lines of the source's comment."""
        yield from self.legend
        if self.spec.packed:
            yield "Rows and keys belong to packed documents, each of which is a separate sequence: see Packed."

    @property
    @abstractmethod
    def summary(self) -> str:
        """The kernel's line in the plan's table."""

    # ---- The decision

    @property
    def forms(self) -> Sequence[Form]:
        """All forms of the kernel. Among forms of equal cost, the first is taken."""
        return (Form(),)

    @property
    def variants(self) -> Sequence[StripSource]:
        """The kernel in each form that fits, the cheapest by the cost model first."""
        sources = (replace(self, form=form) for form in self.forms)
        return sorted((source for source in sources if source.fits), key=lambda source: source.cost)

    @property
    def depends(self) -> str:
        """The part of the decision's key besides the role and the dtype."""
        return ""

    @property
    def key(self) -> str:
        """The key of the decision about the form."""
        return f"strip {self.role} {self.depends} {self.spec.dtype}"

    @property
    def cost(self) -> float:
        """Modelled multiprocessor cycles per score."""
        return streamed(self.role, self.spec.itemsize, self.gpu)

    @property
    def gpu(self) -> Target:
        """The target's limits and rates."""
        return get_target(self.target)

    @property
    def stages(self) -> Stages:
        """The stages that the kernels of the pass compute."""
        return Stages(self.spec)

    @property
    def drops(self) -> bool:
        """Whether the kernel applies dropout."""
        return self.role in self.stages.dropping

    @property
    def dropout(self) -> tuple[Argument, ...]:
        """The arguments for drawing dropout masks; none if the kernel does not apply dropout."""
        return (*reads("long long", "seed"), *numbers("int", *dropout_numbers(self.spec))) if self.drops else ()

    @property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    @property
    def reads_hidden(self) -> HiddenKeys:
        """The hidden keys of planes that the kernel reads."""
        return ALL

    # ---- Sequences

    @property
    def sequence(self) -> StripSequence:
        """Where the rows of a sequence lie, and which keys they see."""
        return StripSequence(self.spec, self.decodes, self.reads_cache)

    @property
    def sequence_arguments(self) -> tuple[str, ...]:
        """Names of the kernel's arguments from which the sequence's struct is made."""
        return self.sequence.made_from({argument.name for argument in self.kernel.arguments})
