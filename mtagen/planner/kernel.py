"""Kernels with their arguments and grids, and buffers: values that sources, host code and notes are printed from.

Sizes are sympy expressions in the symbols below, which host code has under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from .geometry.affine import Size

BATCH, HEADS, KV_HEADS = sympy.symbols("batch heads kv_heads", integer=True, positive=True)
TOTAL_Q = sympy.Symbol("total_q", integer=True, nonnegative=True)  # queries of all packed documents
GROUP = sympy.Symbol("group", integer=True, positive=True)  # heads of queries for each head of keys


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
        name: its name in the kernel, and of what the host passes.
        type: C type of the value, or of what it points to; ``Element`` is that of q, k and v.
            In Triton ``memory``, ``int64``, ``int32`` or ``float``; or ``descriptor`` or ``tiles``: a tensor that is
            read or written by tiles of its last two axes; or ``matrices``: the same of which each packed document is a
            matrix of its own.
        pointer: whether it points to memory of the device.
        written: whether the kernel writes there.
        restrict: whether the kernel is promised that nothing else leads to what it points to.
        optional: whether it may be null.
        block: of a descriptor, the constants that are the extents of its tiles.
        axes: of tiles and of matrices, what the strides of all axes but the last are called.
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
        """What a launcher passes: ``pointer``, or the type of a number."""
        return "pointer" if self.pointer else self.type

    @property
    def declaration(self) -> str:
        """In C."""
        if not self.pointer:
            return f"{self.type} {self.name}"
        return f"{'' if self.written else 'const '}{self.type}* {'__restrict__ ' if self.restrict else ''}{self.name}"


def reads(type: str, *names: str, restrict: bool = True, optional: bool = False) -> tuple[Argument, ...]:
    """Pointers to what a kernel reads."""
    return tuple(Argument(name, type, pointer=True, restrict=restrict, optional=optional) for name in names)


def writes(type: str, *names: str, restrict: bool = True) -> tuple[Argument, ...]:
    """Pointers to what a kernel writes."""
    return tuple(Argument(name, type, pointer=True, written=True, restrict=restrict) for name in names)


def strides(*tensors: str, axes: str = "bhn") -> tuple[Argument, ...]:
    """The strides, in elements, of tensors laid out (B, H, N, D) or as ``axes`` say, less the last, which is 1."""
    return tuple(Argument(f"{tensor}_stride_{axis}", "long long") for tensor in tensors for axis in axes)


def numbers(type: str, *names: str) -> tuple[Argument, ...]:
    """Numbers passed by value."""
    return tuple(Argument(name, type) for name in names)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass.

    Attributes:
        role: what it does in its pass, e.g. ``forward`` or ``backward_rows``.
        name: its entry point.
        arguments: in order.
        grid: blocks along x, then along y and z if there are more.
        threads: threads of a block.
        shared: bytes of dynamic shared memory.
        registers: registers a thread is expected to take at most.
        constants: (name, value) of what Triton's compiler is told besides the source.
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
        name: its name in the host's code, and of the argument it is passed as.
        shape: its extents.
        dtype: ``fp32``, ``int32``, or the name of the argument whose dtype it has.
        like: the argument whose shape it has; ``shape`` is then empty.
        zeroed: whether it starts as zeros; else it may hold anything.
        option: name of the host's option without which it is empty.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...] = ()
    like: str = ""
    zeroed: bool = False
    option: str = ""
