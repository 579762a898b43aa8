"""Kernels with their arguments and grids, and buffers: values from which sources and host code are
printed.

Sizes are sympy expressions in the symbols below, which host code has under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .geometry.affine import Size


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
        name: name of the parameter in the kernel, and of the value in host code.
        type: C type of the value, or of the memory that it points to; ``Element`` is that of q, k
            and v. In Triton ``memory``, ``int64``, ``int32`` or ``float``; or ``descriptor`` or
            ``tiles``: a tensor that is read or written by tiles of its last two axes; or
            ``matrices``: a tensor of which each packed document is a matrix.
        pointer: whether the argument points to memory of the device.
        written: whether the kernel writes to that memory.
        restrict: whether no other pointer of the kernel leads to that memory.
        optional: whether the pointer may be null.
        block: for a descriptor, the constants that are the extents of its tiles.
        axes: for tiles and matrices, names of the strides of all axes except the last.
    """

    name: str
    type: str
    pointer: bool = False
    written: bool = False
    restrict: bool = True
    optional: bool = False
    block: tuple[str, str] | None = None
    axes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of value that a launcher passes: ``pointer``, or the type of a number."""
        return "pointer" if self.pointer else self.type

    @property
    def declaration(self) -> str:
        """The declaration of the parameter in C."""
        if not self.pointer:
            return f"{self.type} {self.name}"
        return f"{'' if self.written else 'const '}{self.type}* {'__restrict__ ' if self.restrict else ''}{self.name}"

    @property
    def member(self) -> str:
        """The declaration of the parameter in a struct of all parameters."""
        return replace(self, restrict=True).declaration


def reads(type: str, *names: str, restrict: bool = True, optional: bool = False) -> tuple[Argument, ...]:
    """Return pointers to memory that a kernel reads."""
    return tuple(Argument(name, type, pointer=True, restrict=restrict, optional=optional) for name in names)


def writes(type: str, *names: str, restrict: bool = True, optional: bool = False) -> tuple[Argument, ...]:
    """Return pointers to memory that a kernel writes."""
    return tuple(
        Argument(name, type, pointer=True, written=True, restrict=restrict, optional=optional) for name in names
    )


def strides(*tensors: str, axes: str = "bhn") -> tuple[Argument, ...]:
    """Return the strides, in elements, of tensors (B, H, N, D), or of other ``axes``, without the
    last.
    """
    return tuple(Argument(f"{tensor}_stride_{axis}", "long long") for tensor in tensors for axis in axes)


def numbers(type: str, *names: str) -> tuple[Argument, ...]:
    """Return numbers that are passed by value."""
    return tuple(Argument(name, type) for name in names)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass.

    Attributes:
        role: the kernel's task in its pass, e.g. ``forward`` or ``backward_rows``.
        name: name of the entry point.
        arguments: the arguments in their order.
        grid: blocks along x, then along y and z if there are any.
        threads: threads of a block.
        shared: bytes of dynamic shared memory.
        registers: expected upper limit of registers per thread.
        constants: (name, value) of the ``tl.constexpr`` parameters of a Triton kernel.
        stages: depth of the pipeline that Triton's compiler makes of the main loop.
    """

    role: str
    name: str
    arguments: tuple[Argument, ...]
    grid: tuple[Size, ...]
    threads: int
    shared: int
    registers: int
    constants: tuple[tuple[str, int], ...] = ()
    stages: int = 1


@dataclass(frozen=True)
class Buffer:
    """Memory that the host allocates for a pass.

    Attributes:
        name: name in host code, and of the argument that the buffer is passed as.
        shape: extents of the buffer.
        dtype: ``fp32``, ``int32``, or the name of an argument with the same dtype.
        like: name of an argument with the same shape; ``shape`` is then empty.
        zeroed: whether the buffer starts as zeros; otherwise it may hold anything.
        needs: the host's condition for the buffer, which is None otherwise; empty for a buffer of each call.
        scratch: whether only kernels read the buffer, whose elements have 4 bytes. Such buffers share one allocation.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...] = ()
    like: str = ""
    zeroed: bool = False
    needs: str = ""
    scratch: bool = False
