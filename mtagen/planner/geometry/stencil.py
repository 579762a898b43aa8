"""Stencils: the scores that a convolved score reads, and from them halos and outputs per tile."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr

from ...errors import PlanError, explain
from ...spec import Spec
from .affine import Interval, Size


@dataclass(frozen=True)
class Stencil:
    """The box of offsets that an output reads: (i, j) reads (i + r, j + c), r in ``rows``, c in
    ``cols``.

    Ends are included and may be symbolic. Every stencil contains the origin.
    """

    rows: Interval
    cols: Interval

    @classmethod
    def forward(cls, cq: Size, pad_left: Size, pad_right: Size) -> Stencil:
        """Return the stencil of the convolution C[i, j] = sum W[u, v] S[i-(cq-1)+u, j-pL+v]."""
        cq, pad_left, pad_right = map(sympy.sympify, (cq, pad_left, pad_right))
        return cls(rows=(1 - cq, sympy.S.Zero), cols=(-pad_left, pad_right))

    def adjoint(self) -> Stencil:
        """Return the stencil of the transposed operator, whose offsets are negated."""
        return Stencil(rows=_negated(self.rows), cols=_negated(self.cols))

    def then(self, other: Stencil) -> Stencil:
        """Return the stencil of applying both, one after the other: the Minkowski sum of the boxes.

        The backward pass recomputes C, then scatters its gradient: ``forward.then(forward.adjoint())``.
        """
        return Stencil(rows=_sum(self.rows, other.rows), cols=_sum(self.cols, other.cols))

    @property
    def halo(self) -> tuple[Expr, Expr, Expr, Expr]:
        """Extra inputs that a tile of outputs reads: (rows above, rows below, columns left, columns
        right).
        """
        return -self.rows[0], self.rows[1], -self.cols[0], self.cols[1]

    def effective(self, tile_rows: Size, tile_cols: Size) -> tuple[Expr, Expr]:
        """Return (B_r, B_c), the outputs that a loaded tile of inputs yields: the tile less its
        halos.

        Raises:
            PlanError: the halo leaves no output.
        """
        above, below, left, right = self.halo
        outputs = sympy.sympify(tile_rows) - above - below, sympy.sympify(tile_cols) - left - right
        if any(extent.is_nonpositive for extent in outputs):
            legal = f"at least {above + below + 1} x {left + right + 1}"
            raise PlanError(explain("tile", (tile_rows, tile_cols), "the halo leaves no output", legal))
        return outputs

    def blocks(self, rows: Size, cols: Size, tile_rows: Size, tile_cols: Size) -> tuple[Expr, Expr]:
        """Return the number of tiles along each axis that cover ``rows`` x ``cols`` outputs."""
        block_rows, block_cols = self.effective(tile_rows, tile_cols)
        return sympy.ceiling(rows / block_rows), sympy.ceiling(cols / block_cols)


def pipeline_stencil(spec: Spec) -> Stencil:
    """Return the stencil of all convolutions of a pipeline, one after the other."""
    stencil = Stencil.forward(1, 0, 0)
    for cq, ck in spec.kernels.values():
        stencil = stencil.then(Stencil.forward(cq, *spec.padding(ck)))
    return stencil


def _negated(interval: Interval) -> Interval:
    first, last = interval
    return -last, -first


def _sum(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]
