"""Products of a warpgroup, as the templates print them."""

from __future__ import annotations

from typing import NamedTuple


class Wgmma(NamedTuple):
    """One warpgroup product d[64 x n] (+)= a[64 x 16] b[16 x n] of elements of ``dtype``."""

    name: str
    n: int
    dtype: str
    a_in_registers: bool = False
    a_transposed: bool = False
    b_transposed: bool = False

    @property
    def operands(self) -> int:
        """Number of registers of a and b in the instruction's operand list."""
        return 5 if self.a_in_registers else 2

    @property
    def element(self) -> str:
        """The instruction's name of the dtype."""
        return {"bf16": "bf16", "fp16": "f16"}[self.dtype]
