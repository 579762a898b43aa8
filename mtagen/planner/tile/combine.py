"""The partial results of splits of the keys, and the kernel that merges them.

A split writes its part of each output and the log-sum-exp (log2) of its keys. The merged output is
the mean of the parts, weighted with exp2 of their log-sum-exps. Splits that see no key have no
weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...spec import Spec
from ..cuda.score import sink
from ..geometry.affine import Size
from ..kernel import Buffer, Kernel, numbers, reads, writes
from ..names import kernel_name
from ..sizes import HEADS, SPLITS

_REGISTERS = 64


@dataclass(frozen=True)
class Combine:
    """The merging of a pass's splits.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: the pass, as in kernels' names.
        rows: extents of the rows of outputs; their product is the number of rows.
        warps: warps that share the splits of a row.
    """

    spec: Spec
    target: str
    pass_name: str
    rows: tuple[Size, ...]
    warps: int

    @property
    def partials(self) -> tuple[Buffer, ...]:
        """The buffers for the results of splits, which the host allocates for several splits."""
        rows = (*self.rows, SPLITS)
        partial = Buffer("partial", "fp32", (*rows, self.spec.value_head_dim))
        return (partial, Buffer("partial_lse", "fp32", rows))

    @property
    def kernel(self) -> Kernel:
        """The kernel, which is launched for several splits. A CTA takes a row."""
        arguments = (
            *reads("float", "partial", "partial_lse"),
            *sink(self.spec),
            *writes("Element", "out"),
            *writes("float", "lse"),
            *numbers("int", "num_splits", *((HEADS.name, str(self.rows[-1])) if self.spec.sink else ())),
        )
        name = kernel_name("tile", f"{self.pass_name}_combine", self.spec, self.target)
        return Kernel("combine", name, arguments, (sympy.prod(self.rows),), 32 * self.warps, 0, _REGISTERS)
