"""Splits of the keys: what each makes of a row, and the kernel that merges it.

A split leaves its part of each output and the log-sum-exp of its keys. The merged output is the mean of the parts,
weighted with exp2 of these; splits that see no key have no weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...spec import Spec
from ..geometry.affine import Size
from ..kernel import Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name

SPLITS = sympy.Symbol("splits", integer=True, positive=True)
_REGISTERS = 64


@dataclass(frozen=True)
class Combine:
    """How a pass merges its splits.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: the pass, as kernels' names have it.
        rows: extents of the rows of outputs, whose product is their number.
        warps: warps that share the splits of a row.
    """

    spec: Spec
    target: str
    pass_name: str
    rows: tuple[Size, ...]
    warps: int

    @property
    def partials(self) -> tuple[Buffer, ...]:
        """The results of splits, which the host allocates where there are several."""
        rows = (*self.rows, SPLITS)
        partial = Buffer("partial", "fp32", (*rows, self.spec.value_head_dim))
        return (partial, Buffer("partial_lse", "fp32", rows))

    @property
    def kernel(self) -> Kernel:
        """The kernel, launched where there are several splits: a CTA takes a row."""
        arguments = (
            *reads("float", "partial", "partial_lse"),
            *writes("Element", "out"),
            *writes("float", "lse"),
            *numbers("int", "num_splits"),
        )
        name = kernel_name("tile", f"{self.pass_name}_combine", self.spec, self.target)
        return Kernel("combine", name, arguments, (sympy.prod(self.rows),), 32 * self.warps, 0, _REGISTERS)
