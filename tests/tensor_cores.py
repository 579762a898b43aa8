"""The warp instructions that the CUDA templates are made of, in NumPy, lane by lane as the PTX ISA lays them out.

A register of a warp is an array (32 lanes, 2): two 16-bit elements, the low half first. Values are float64:
integers stay exact, and memory that nobody has written is NaN, which no zero weight hides.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.float64]
Addresses = NDArray[np.int64]

LANES = np.arange(32)
G, T = LANES >> 2, LANES & 3  # row and column of a lane in a fragment
WINDOW = 128  # bytes that the banks deliver at a time


class SharedMemory:
    """Bytes of shared memory, as 16-bit elements.

    Attributes:
        ways: the most times that an access had to go to one bank for different words.
    """

    def __init__(self, size: int) -> None:
        self.elements = np.full(size // 2, np.nan)
        self.ways = 1

    def store(self, to: Addresses, *words: Words) -> None:
        """st.shared, .v2 or .v4: each lane that gives an address stores consecutive words."""
        at = self._elements(to, len(words))
        self.elements[at] = np.concatenate(words, axis=-1)

    def load(self, from_: Addresses, words: int = 1) -> list[Words]:
        """ld.shared, .v2 or .v4."""
        at = self._elements(from_, words)
        return [self.elements[at[..., 2 * i : 2 * i + 2]] for i in range(words)]

    def load_matrices(self, rows: Addresses, *, count: int = 4, transposed: bool = False) -> Words:
        """ldmatrix.x4 (or .x2): (4, 32, 2), of which lane l gave the address of row l % 8 of matrix l / 8."""
        at = self._elements(rows[: 8 * count], 4)
        matrices = self.elements[at].reshape(count, 8, 8)
        return fragment(np.swapaxes(matrices, -1, -2) if transposed else matrices)

    def _elements(self, addresses: Addresses, words: int) -> Addresses:
        """Indices (lanes, 2 words) of the elements at these addresses, which must be aligned and inside."""
        assert not (addresses % (4 * words)).any(), f"not aligned to {4 * words} bytes"
        assert addresses.min() >= 0
        assert addresses.max() + 4 * words <= 2 * self.elements.size
        lanes = WINDOW // (4 * words)  # that are served together
        for first in range(0, addresses.size, lanes):
            together = addresses[first : first + lanes]
            self.ways = max(self.ways, bank_conflicts((together - together.min() // WINDOW * WINDOW).tobytes(), words))
        return addresses[..., None] // 2 + np.arange(2 * words)


@cache
def bank_conflicts(addresses: bytes, words: int) -> int:
    """The most different words that one of the 32 banks is asked for; the addresses' int64s are the key of a cache."""
    asked = np.unique(np.frombuffer(addresses, np.int64)[:, None] // 4 + np.arange(words))
    return int(np.bincount(asked % 32).max())


def fragment(matrices: NDArray[np.float64]) -> Words:
    """(.., 8, 8) -> (.., 32, 2): lane 4 g + t holds row g, columns 2 t and 2 t + 1."""
    return matrices.reshape(*matrices.shape[:-2], 32, 2)


def matrix(words: Words) -> NDArray[np.float64]:
    """Inverse of :func:`fragment`."""
    return words.reshape(*words.shape[:-2], 8, 8)


def mma(c: Words, a: Words, b: Words) -> None:
    """mma.m16n8k16: c (2, 32, 2) += a (4, 32, 2) b (2, 32, 2).

    a: rows g and g + 8 of columns 2 t.., then of columns 8 + 2 t..; b: rows 2 t.. and 8 + 2 t.. of column g; c: rows g
    and g + 8 of columns 2 t..; each the element there and the next.
    """
    blocks, transposed = matrix(a).reshape(2, 2, 8, 8), matrix(b)
    c += fragment(np.einsum("khix,kjx->hij", blocks, transposed))


def tile_address(tile: int, rows: int, row: Addresses, column: Addresses) -> Addresses:
    """Address of 16-byte column ``column`` of row ``row``: panels of ``rows`` rows of 128 bytes, swizzled."""
    return tile + (column >> 3) * (rows * 128) + row * 128 + (((column ^ row) & 7) << 4)


def swizzled(address: Addresses) -> Addresses:
    """Where wgmma's 128-byte swizzle puts a byte: bits 4..6 are exchanged by bits 7..9."""
    return address ^ ((address >> 7 & 7) << 4)
