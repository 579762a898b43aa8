"""What launching and describing a CUDA kernel needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One CUDA kernel of a pass.

    Attributes:
        role: what it does in its pass, e.g. ``forward`` or ``backward_rows``.
        name: its entry point, ``extern "C"``.
        arguments: (C type, name) in order; types: ``pointer``, ``int``, ``long long``, ``float``.
        grid: the launch grid (x, y) in words and formulas, for readers.
        threads: threads of a block.
        shared: bytes of dynamic shared memory.
        registers: registers a thread is expected to take at most.
    """

    role: str
    name: str
    arguments: tuple[tuple[str, str], ...]
    grid: str
    threads: int
    shared: int
    registers: int


def strides(*tensors: str) -> tuple[tuple[str, str], ...]:
    """Arguments for the strides, in elements, of tensors laid out (B, H, N, D)."""
    return tuple(("long long", f"{tensor}_stride_{axis}") for tensor in tensors for axis in "bhn")
