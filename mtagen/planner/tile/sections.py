"""In which order the CTAs of long sequences run: those of a few heads at a time, so that L2 keeps what they stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from sympy import Expr, floor

from ..geometry.affine import Size

TOGETHER = sympy.Symbol("together", integer=True, positive=True)  # heads of a section
# From so many numbers of a head's queries on, kernels of (6, 11), causal, with 64 and 128 columns gain 1 to 4 % on an
# H100; others were not timed. Those of shorter sequences gain nothing or lose, because the CTAs that run last are of
# fewer heads then, and their lengths differ more.
_LONG = 2**22


@dataclass(frozen=True)
class Sections:
    """A grid of CTAs, each for a tile of a head, that is cut into sections of heads.

    A GPU starts blocks in the order of x, then of y and z. So along x are the heads of a section, along y their tiles,
    along z sections. The host chooses by ``templates/host/sections.py`` how many heads a section has: ``few`` where
    CTAs stream a long sequence, else all.

    Attributes:
        heads: heads through the batch that CTAs are for.
        few: heads of a section of a long sequence.
        streamed: rows of a sequence that a CTA streams.
        head_dim: size of a row.
        tiles: tiles of a head.
        option: name of the host's option that asks for one section, if any.
    """

    heads: Expr
    few: int
    streamed: Size
    head_dim: int
    tiles: Expr
    option: str = ""

    @property
    def long(self) -> int:
        """Rows of a long sequence."""
        return _LONG // self.head_dim

    @property
    def grid(self) -> tuple[Expr, ...]:
        """CTAs, one for each tile of each head."""
        return TOGETHER, self.tiles, floor(self.heads / TOGETHER)

    @property
    def legend(self) -> Iterator[str]:
        """What the grid's first and third extents mean."""
        yield "The CTAs of `together` heads run beside each other, then those of as many others, and so on."
