"""Where the keys and values of a decode step lie."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import Spec
from .kernel import Argument, numbers, reads


@dataclass(frozen=True)
class Cache:
    """A cache of keys and values.

    Attributes:
        page_size: tokens of a page; None: each sequence has an entry of the cache.
    """

    page_size: int | None

    @classmethod
    def of(cls, spec: Spec) -> Cache:
        """Return the cache of a request."""
        return cls(spec.page_size)

    @property
    def template(self) -> str:
        """The template, of each backend, that finds the rows of a sequence."""
        return "cache_pages.j2" if self.page_size else "cache_entries.j2"

    def cuda_arguments(self, *, restrict: bool = False) -> tuple[Argument, ...]:
        """Return the arguments of CUDA kernels that say where rows lie, besides the strides."""
        if self.page_size is None:
            return ()
        return (*reads("int", "block_table", restrict=restrict), *numbers("int", "table_width"))

    @property
    def triton_arguments(self) -> tuple[Argument, ...]:
        """The same of Triton kernels."""
        if self.page_size is None:
            return ()
        return Argument("block_table_ptr", "memory", pointer=True), *numbers("int32", "table_width")
