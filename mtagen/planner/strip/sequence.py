"""The sequences that the kernels of the lowering "strip" work on: where their rows lie, and which
keys they see.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from ...spec import Spec
from ..cache import Cache
from ..geometry.mask import Mask
from ..kernel import Argument, numbers, reads
from ..targets import get_target
from .documents import TILE, begin_multiple

NO_LIMIT = -1  # stands in kernels for a window side without a limit
# The kernel's arguments from which each struct is made; a kernel may lack some.
_ARGUMENTS = {
    "Batch": ("count", "keys", "off", "first", "key0"),
    "Packed": ("documents", "place0", "count", "skip"),
    "PagedPacked": ("documents", "block_table", "table_width", "place0", "count", "skip"),
    "Step": ("seqlens", "has_seqlens", "n_k", "count", "keys", "first"),
    "PagedStep": ("seqlens", "has_seqlens", "n_k", "block_table", "table_width", "count", "keys", "first"),
}


@dataclass(frozen=True)
class StripSequence:
    """The sequence of some rows of a strip, as CUDA kernels take it.

    Attributes:
        spec: the request.
        decodes: whether the kernel is one of a decode step, whose sequences have different lengths.
        reads_cache: whether it reads keys or values, which may lie in pages.
    """

    spec: Spec
    decodes: bool
    reads_cache: bool = False

    @property
    def struct(self) -> str:
        """The C++ struct that knows where the rows of a sequence lie."""
        rows = "Step" if self.decodes else "Packed" if self.spec.packed else "Batch"
        return f"Paged{rows}" if self.spec.page_size and self.reads_cache else rows

    @property
    def constants(self) -> Mapping[str, int]:
        """The constants that the struct needs."""
        packed = {"TILE": TILE, "CONTEXT": self.spec.context, "KEY_MULTIPLE": begin_multiple(self.spec)}
        pages = {"PAGE_SIZE": self.spec.page_size} if self.spec.page_size and self.reads_cache else {}
        return (packed if self.spec.packed else {}) | pages

    @property
    def seen_behind(self) -> int:
        """Number of keys before its own position that a query sees; NO_LIMIT if there is no limit."""
        left = Mask.of(self.spec).left
        return NO_LIMIT if left is None else left

    @property
    def seen_ahead(self) -> int:
        """Number of keys after its own position that a query sees; NO_LIMIT if there is no limit."""
        right = Mask.of(self.spec).right
        return NO_LIMIT if right is None else right

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments of the struct's constructor. Pointers among them point to ints."""
        return _ARGUMENTS[self.struct]

    def made_from(self, names: Container[str]) -> tuple[str, ...]:
        """Return the kernel's arguments that it passes to the struct's constructor.

        Args:
            names: the names of all arguments of the kernel.
        """
        needed = self.names
        if self.decodes and "n_k" not in names:
            needed = tuple("keys" if name == "n_k" else name for name in needed)  # planes hold all keys
        return tuple(name for name in needed if name in names)

    def arguments(self, *more: str, skips: bool = True) -> tuple[Argument, ...]:
        """Return the arguments that describe a strip of forward or backward, and other numbers.

        Args:
            more: names of the other numbers.
            skips: whether the kernel takes ``skip``, before which rows are context only. Kernels for
                documents always take it.
        """
        if self.spec.packed:
            return (*reads("int", "documents"), *numbers("int", "count", "keys", "place0", "skip", "pitch", *more))
        skip = ("skip",) if skips else ()
        return numbers("int", "count", "keys", "off", "first", *skip, "pitch", *more)


def cache_arguments(spec: Spec) -> tuple[Argument, ...]:
    """Return the arguments of CUDA kernels that read the cache of a decode step: which keys, and where they lie."""
    return (*step_numbers(spec, "int"), *Cache.of(spec).cuda_arguments())


def step_numbers(spec: Spec, type: str = "int32") -> tuple[Argument, ...]:
    """Return the numbers that decode kernels need for the lengths of sequences: whether there are any, or all keys of
    the cache are in use; and the keys of the cache, if planes hold a window's keys only.
    """
    return numbers(type, "has_seqlens", *(["n_k"] if Mask.of(spec).hides_earlier else []))


def by_descriptor(spec: Spec, target: str) -> bool:
    """Return whether tensor descriptors load and store tiles.

    They cannot stop at the end of a document, and cannot find pages.
    """
    return get_target(target).tensor_descriptors and not spec.packed and not spec.page_size
