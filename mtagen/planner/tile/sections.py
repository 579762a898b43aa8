"""Sections of a grid: CTAs of a few heads run at a time, so that L2 holds the rows that they
stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sympy import Expr, floor

from ..geometry.affine import Size
from ..sizes import TOGETHER

# A sequence is long if a head streams this many elements. From this length on, sections make (6, 11), causal, with head
# dims 64 and 128, 1 to 4 % faster on an H100; other shapes were not timed. Shorter sequences gain nothing or lose,
# because the CTAs that run last are of fewer heads then, and their lengths differ more.
_LONG = 2**22


@dataclass(frozen=True)
class Sections:
    """A grid of CTAs, each for a tile of a head, that is cut into sections of heads.

    A GPU starts blocks in the order of x, then of y and z. So the heads of a section lie along x,
    their tiles along y, and sections along z. The host chooses the number of heads of a section by
    ``templates/host/sections.py``: ``few`` if CTAs stream a long sequence, else all.

    Attributes:
        heads: number of heads in the whole batch.
        few: heads of a section if the sequence is long.
        streamed: number of rows that a CTA streams.
        head_dim: elements of a row.
        tiles: number of tiles of a head.
        option: name of the host's option that forces one section, if any.
    """

    heads: Expr
    few: int
    streamed: Size
    head_dim: int
    tiles: Expr
    option: str = ""

    @property
    def long(self) -> int:
        """Number of rows from which on a sequence is long."""
        return _LONG // self.head_dim

    @property
    def grid(self) -> tuple[Expr, ...]:
        """The grid: a CTA for each tile of each head."""
        return TOGETHER, self.tiles, floor(self.heads / TOGETHER)

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment that explain the grid's first and third extents."""
        yield "The CTAs of `together` heads run side by side, then those of the next `together` heads, and so on."
