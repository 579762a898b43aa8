"""Maps of shared memory: named regions, aligned and laid out one after another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

PANEL = 64  # columns of 16 bits that are swizzled together, 128 bytes a row


def swizzled_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a tile of 16-bit elements in whole panels, as in swizzle.cuh."""
    return -(-columns // PANEL) * PANEL * 2 * rows


class Region(NamedTuple):
    """A part of a CTA's shared memory."""

    name: str
    offset: int  # bytes
    size: int  # bytes


def lay_out(sizes: Iterable[tuple[str, int, int]]) -> tuple[Region, ...]:
    """Lay out (name, bytes, alignment) in order; regions without bytes are left out."""
    regions, end = [], 0
    for name, size, alignment in sizes:
        if size:
            offset = -(-end // alignment) * alignment
            regions.append(Region(name, offset, size))
            end = offset + size
    return tuple(regions)


@dataclass(frozen=True)
class SharedMap:
    """Regions of shared memory, none overlapping another."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int, int]]) -> SharedMap:
        """Lay out (name, bytes, alignment) in order: see ``lay_out``."""
        return cls(lay_out(sizes))

    @property
    def size(self) -> int:
        """Bytes from the first region's beginning to the last region's end."""
        return max((region.offset + region.size for region in self.regions), default=0)

    def __getitem__(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)
